"""Memory for large tensors that arrive, used again: the first touch of fresh pages takes longer than the network does.

NOTE [Buffers]
1. A buffer is page-aligned and belongs to the tensor that was made on it, until that tensor's storage dies. Then it is
   idle. So many bytes at most are idle: what comes on top goes back to the system, and where no idle buffer fits, those
   that were idle longest make room for the one that is made.
2. Storages die in any thread and in the midst of anything, also of `take`. So giving back takes no lock.
3. Like all memory that comes from NumPy's side, such a storage can't be resized.
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
    """A process' buffers.

    Attributes:
        idle_bytes: The bytes of unused buffers that are kept, see Rule 1.
    """

    def __init__(self, idle_bytes: int = IDLE_BYTES) -> None:
        self.idle_bytes = idle_bytes
        self._idle: deque[mmap.mmap] = deque()  # oldest first
        self._lock = threading.Lock()  # guards `_idle`

    def take(self, size_bytes: int) -> Tensor:
        """uint8 [size_bytes] with undefined elements, owned by the caller."""
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
"""Of this process."""
