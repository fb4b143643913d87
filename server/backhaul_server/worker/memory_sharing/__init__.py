"""Memory that a worker shares with trainers on the same machine."""
