"""Predicts the time of a step from what one segment costs: `backhaul simulate`."""
