"""Evidence: what a session writes to a directory so that `backhaul verify` can compute steps again later."""
