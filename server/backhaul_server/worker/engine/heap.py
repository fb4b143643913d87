"""Settings of glibc's malloc: freed memory stays with the process. Without glibc nothing is changed.

A training step allocates and frees the same memory as the step before. Memory that malloc has returned to the system
meanwhile causes page faults when it is used again: 170,000 of them, or 290 ms, for 670 MB of saved tensors, in one
step of ten. So the process keeps freed memory, which never exceeds what was charged at once, until an execution needs
it elsewhere or the last session is closed.
"""

import ctypes
from contextlib import suppress
from typing import Any

from backhaul_runtime.tensors.buffer_pool import BUFFERS

_MAPPED_BYTES = 256 << 20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_NEVER = -1


def keep_freed_memory(budget_bytes: int) -> None:
    """Makes malloc keep freed memory, except that of tensors so large that each is mapped by itself; see mallopt(3).

    This needs a single arena: the arenas of other threads return heaps of 64 MiB as they become empty, whatever is set.

    Args:
        budget_bytes: The worker's budget, of which an eighth at most is mapped tensor by tensor.
    """
    largest = BUFFERS.idle_bytes = min(_MAPPED_BYTES, budget_bytes // 8)
    for parameter, value in ((_M_MMAP_THRESHOLD, largest), (_M_TRIM_THRESHOLD, _NEVER), (_M_ARENA_MAX, 1)):
        _call("mallopt", parameter, value)


def return_freed_memory() -> None:
    """Returns all free memory of malloc to the system."""
    _call("malloc_trim", 0)


def _call(name: str, *arguments: Any) -> None:
    with suppress(AttributeError):
        getattr(_libc, name)(*arguments)


_libc: ctypes.CDLL | None = None
with suppress(OSError):
    _libc = ctypes.CDLL("libc.so.6")
