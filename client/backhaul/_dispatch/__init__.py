"""Chooses a worker for each segment, and sends inputs before a call has ended if the program can be predicted."""
