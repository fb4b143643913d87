"""Tensors as bytes: layouts, digests, random projections, and copies between devices and the host."""
