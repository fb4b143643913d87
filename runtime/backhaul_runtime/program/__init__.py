"""Programs: recorded calls as data, their encoding, and which ops and arguments are allowed."""
