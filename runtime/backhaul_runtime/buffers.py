"""Memory for large tensors that arrive, used again: the first touch of fresh pages takes longer than the network does.

NOTE [Buffers]
1. A buffer is page-aligned and belongs to the tensor that was made on it, until that tensor's storage dies. Then it is
   idle. So many bytes at most are idle: those that were so longest go back to the system.
2. Storages die in any thread and in the midst of anything, also of `take`. So giving back waits for no lock: whoever
   holds it looks again once it let go.
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


class Buffers:
    """A process' buffers.

    Attributes:
        idle_bytes: See Rule 1.
    """

    def __init__(self, idle_bytes: int = IDLE_BYTES) -> None:
        self.idle_bytes = idle_bytes
        self._idle: deque[mmap.mmap] = deque()  # oldest first
        self._lock = threading.Lock()

    def take(self, size_bytes: int) -> Tensor:
        """uint8 [size_bytes] with undefined elements, owned by the caller."""
        needed = -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        with self._lock:
            found = next((buffer for buffer in reversed(list(self._idle)) if len(buffer) == needed), None)
            if found is not None:
                self._idle.remove(found)
        buffer = found or mmap.mmap(-1, needed, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        array = np.frombuffer(buffer, np.uint8)[:size_bytes]
        weakref.finalize(array, self._give_back, buffer).atexit = False
        self._trim()
        return torch.from_numpy(array)

    def _give_back(self, buffer: mmap.mmap) -> None:
        self._idle.append(buffer)
        self._trim()

    def _trim(self) -> None:
        while sum(map(len, list(self._idle))) > self.idle_bytes and self._lock.acquire(blocking=False):  # Rule 2
            try:
                if self._idle:
                    self._idle.popleft()
            finally:
                self._lock.release()


BUFFERS = Buffers()
"""Of this process."""
