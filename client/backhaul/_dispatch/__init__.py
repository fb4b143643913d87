"""Chooses a worker for each segment, and sends ahead what a segment will probably need."""
