"""Regions of a checkpointed call whose saved tensors stay on the trainer, chosen by the code inside the call.

A selective policy (`selective.py`) chooses by op. A region chooses by source code, which the form of torch_remat needs.
What autograd saves inside a region is neither recomputed nor fetched. Workers still run the ops of the region, because
later ops of the segment may need their results.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar

_is_open: ContextVar[bool] = ContextVar("backhaul_kept_region", default=False)


def kept_region() -> AbstractContextManager[None]:
    """Keeps what autograd saves inside the `with` block. Without effect outside a checkpointed call."""
    return _set_to(True)


def outside_of_kept_regions() -> AbstractContextManager[None]:
    """Begins a checkpointed call. A region around the call has no effect on what is inside of it."""
    return _set_to(False)


@contextmanager
def _set_to(is_open: bool) -> Iterator[None]:
    token = _is_open.set(is_open)
    try:
        yield
    finally:
        _is_open.reset(token)


def is_in_kept_region() -> bool:
    """Whether the calling code runs inside `kept_region`."""
    return _is_open.get()
