"""Numbers both sides must agree on. Free of torch."""

from collections.abc import Sequence

PROTOCOL_VERSION = 6

CHUNK_BYTES = 1 << 20
"""Data per message of a tensor stream. 256 KiB and 4 MiB reach 0.55 to 0.9 of its throughput."""

PROGRESS_INTERVAL_S = 0.5
"""How often a worker says that a request still waits or runs."""

LEASE_S = 30.0
"""What a worker holds for a trainer that stays silent so long is freed."""

MAX_MESSAGE_BYTES = 4 << 20
"""The largest message that a worker takes. Tensors come in messages of 1 MiB; a program, and the generator states of a
segment, must fit in one."""

MAX_DECLARED = 1024
"""Tensors that one message may declare, so that taking a message in is a bounded piece of work."""

MAX_NAME = 512
"""Characters of what people call a segment or a trainer. A trainer cuts longer names, a worker refuses them."""

CHANNEL_OPTIONS: Sequence[tuple[str, int]] = (
    ("grpc.max_receive_message_length", 16 << 20),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.use_local_subchannel_pool", 1),  # a session's connections are its own, so closing it closes them
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5_000),  # also how long one attempt to connect may take
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.enable_http_proxy", 0),
)
"""Of every channel to a worker. Calls have deadlines of their own and do not rely on keepalive."""
