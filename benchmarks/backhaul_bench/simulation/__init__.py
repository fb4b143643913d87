"""The measurements behind `backhaul simulate`: the costs of one segment, and steps to compare with predictions."""
