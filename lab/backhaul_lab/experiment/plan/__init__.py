"""What an experiment consists of: its file, its axes, its cells, and the share of a core that each node gets. Pure."""
