"""The worker: one process per device and trust domain."""
