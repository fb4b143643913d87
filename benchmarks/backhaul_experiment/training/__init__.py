"""What a trainer process does: the models, the variants that take turns, and the costs for the simulator."""
