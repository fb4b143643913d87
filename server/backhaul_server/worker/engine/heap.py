"""What malloc does with memory that was freed, on glibc. Elsewhere it is left as it is.

A step takes and frees the same memory as the one before. What malloc returned meanwhile has to be touched anew: 670 MB
of saved tensors are 170,000 page faults, 290 ms, and a step in ten had them. So all of it stays, never more than was
charged at once, until it is wanted elsewhere or the last trainer has gone.
"""

import ctypes
from contextlib import suppress
from typing import Any

from backhaul_runtime.tensors.buffer_pool import BUFFERS

_MAPPED_BYTES = 256 << 20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_NEVER = -1


def keep_freed_memory(budget_bytes: int) -> None:
    """Lets freed memory be used again, up to the size of a tensor that is mapped by itself; see mallopt(3).

    That takes a single arena: those of other threads return heaps of 64 MiB as they become empty, whatever is set.
    """
    largest = BUFFERS.idle_bytes = min(_MAPPED_BYTES, budget_bytes // 8)
    for parameter, value in ((_M_MMAP_THRESHOLD, largest), (_M_TRIM_THRESHOLD, _NEVER), (_M_ARENA_MAX, 1)):
        _call("mallopt", parameter, value)


def return_freed_memory() -> None:
    """Gives the system what is free now."""
    _call("malloc_trim", 0)


def _call(name: str, *arguments: Any) -> None:
    with suppress(AttributeError):
        getattr(_libc, name)(*arguments)


_libc: ctypes.CDLL | None = None
with suppress(OSError):
    _libc = ctypes.CDLL("libc.so.6")
