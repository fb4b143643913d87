"""Regions of a checkpointed call whose saved tensors stay on the trainer, chosen by the code inside the call.

A selective policy (`selective.py`) chooses by op. A region chooses by source code, which the form of torch_remat needs.
What autograd saves inside a region is neither recomputed nor fetched. Workers still run the ops of the region, because
later ops of the segment may need their results.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_is_open: ContextVar[bool] = ContextVar("backhaul_kept_region", default=False)


@contextmanager
def kept_region() -> Iterator[None]:
    """Keeps what autograd saves inside the `with` block. Without effect outside a checkpointed call."""
    token = _is_open.set(True)
    try:
        yield
    finally:
        _is_open.reset(token)


def is_in_kept_region() -> bool:
    """Whether the calling code runs inside `kept_region`."""
    return _is_open.get()
