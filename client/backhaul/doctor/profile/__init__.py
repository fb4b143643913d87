"""Measures what a user's model costs on this trainer and on a worker. `backhaul plan` starts from it, too."""
