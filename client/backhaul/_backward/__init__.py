"""Backward: what the trainer keeps of a segment, the value check, and local recomputation."""
