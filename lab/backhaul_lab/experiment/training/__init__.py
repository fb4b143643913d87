"""What a trainer process does: the models, and the variants that take turns."""
