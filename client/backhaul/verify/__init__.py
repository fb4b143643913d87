"""`backhaul verify`: computes recorded steps again, and compares."""
