"""Measures what a user's model costs on this trainer and on a worker, for `backhaul doctor` and `backhaul plan`."""
