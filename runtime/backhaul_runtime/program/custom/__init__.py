"""What a worker's operator allows beside torch's own ops: its names, and whether both sides run the same code."""
