"""Reuses memory for large tensors that arrive: the first touch of fresh pages takes longer than the network.

NOTE [Buffers]
1. A buffer is page-aligned and belongs to the tensor that was created on it, until the storage of that tensor dies.
   Then the buffer is idle. The bytes of idle buffers are bounded: the excess is returned to the system, and if no idle
   buffer fits a request, the buffers that were idle longest make room for the new one.
2. Storages die in any thread and at any point, even during `take`. So returning a buffer takes no lock.
3. Like all memory that comes from NumPy, such a storage cannot be resized.
"""

import mmap
import threading
import weakref
from collections import deque

import numpy as np
import torch
from torch import Tensor

IDLE_BYTES = 96 << 20


class BufferPool:
    """The buffers of a process. Thread-safe.

    Attributes:
        idle_bytes: The bytes of unused buffers that are kept, see Rule 1.
    """

    def __init__(self, idle_bytes: int = IDLE_BYTES) -> None:
        self.idle_bytes = idle_bytes
        self._idle: deque[mmap.mmap] = deque()  # oldest first
        self._lock = threading.Lock()  # guards `_idle`

    def take(self, size_bytes: int) -> Tensor:
        """Returns a uint8 tensor [size_bytes] with undefined elements, owned by the caller."""
        needed = -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        with self._lock:
            buffer = next((buffer for buffer in reversed(list(self._idle)) if len(buffer) == needed), None)
            if buffer is not None:
                self._idle.remove(buffer)
            else:
                while self._idle and needed <= self.idle_bytes and not self._has_room(needed):
                    self._idle.popleft()
        if buffer is None:
            buffer = mmap.mmap(-1, needed, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        array = np.frombuffer(buffer, np.uint8)[:size_bytes]
        weakref.finalize(array, self._give_back, buffer).atexit = False
        return torch.from_numpy(array)

    def _has_room(self, size_bytes: int) -> bool:
        return sum(map(len, list(self._idle))) + size_bytes <= self.idle_bytes

    def _give_back(self, buffer: mmap.mmap) -> None:
        if self._has_room(len(buffer)):
            self._idle.append(buffer)


BUFFERS = BufferPool()
"""The pool of this process."""
