"""Constants that trainer and worker must agree on. Does not import torch."""

from collections.abc import Sequence

from backhaul_runtime.process.addresses import Address

PROTOCOL_VERSION = 9

CHUNK_BYTES = 1 << 20
"""Bytes of elements per message of a tensor stream. Sizes of 256 KiB and 4 MiB reach 0.55 to 0.9 of its throughput."""

MOST_PUSHED, PUSHED_BYTES = 64, 4 << 20
"""Number and bytes of pushed results beyond which a worker pushes no more until the trainer has taken some."""

PROGRESS_INTERVAL_S = 0.5
"""Seconds between the messages by which a worker reports that a request still waits or runs."""

LEASE_S = 30.0
"""Seconds after which a worker frees everything that it holds for a silent trainer."""

MAX_MESSAGE_BYTES = 4 << 20
"""The largest message in bytes that a worker accepts. Tensors are sent in messages of 1 MiB.

A program must fit in one message, and so must the generator states of a segment."""

MAX_DECLARED = 1024
"""Number of tensors that one message may declare. It bounds the work of reading a message."""

MAX_NAME = 512
"""Characters of the name of a segment or a trainer. A trainer cuts longer names; a worker refuses them."""

CHANNEL_OPTIONS: Sequence[tuple[str, int]] = (
    ("grpc.max_receive_message_length", 16 << 20),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.use_local_subchannel_pool", 1),  # a session's connections are its own, so closing it closes them
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5_000),  # also how long one attempt to connect may take
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.enable_http_proxy", 0),
)
"""Options of every channel to a worker. Calls have their own deadlines and do not rely on keepalive."""


def options_to(address: Address) -> Sequence[tuple[str, int | str]]:
    """Returns the options of a channel with TLS, which verifies the name by which the user knows the worker."""
    name = address.verified_name
    return [*CHANNEL_OPTIONS, *([("grpc.ssl_target_name_override", name)] if name else [])]
