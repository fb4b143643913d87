"""Forward: runs a checkpointed call once, records it, and replaces its graph."""
