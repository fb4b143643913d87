"""Numbers both sides must agree on. Free of torch."""

from collections.abc import Sequence

PROTOCOL_VERSION = 5

CHUNK_BYTES = 1 << 20
"""Data per message of a tensor stream. 256 KiB and 4 MiB reach 0.55 to 0.9 of its throughput."""

PROGRESS_INTERVAL_S = 0.5
"""How often a worker says that a request still waits or runs."""

LEASE_S = 30.0
"""What a worker holds for a trainer that stays silent so long is freed."""

CHANNEL_OPTIONS: Sequence[tuple[str, int]] = (
    ("grpc.max_receive_message_length", 16 << 20),
    ("grpc.max_send_message_length", 16 << 20),
    ("grpc.use_local_subchannel_pool", 1),  # a session's connections are its own, so closing it closes them
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5_000),  # also how long one attempt to connect may take
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.enable_http_proxy", 0),
)
"""Of every channel to a worker. Calls have deadlines of their own and do not rely on keepalive."""
