"""`backhaul simulate` predicts the duration of a training step from the costs of one segment."""
