"""What the API and `backhaul top` show, computed from the collected records on request."""
