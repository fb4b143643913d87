"""The bounds of an execution: cancellation, a deadline, and a memory limit.

NOTE [Bounds of an execution]
1. `Bounds.check` is called between ops, in forward and in backward. It ends an execution whose segment was released,
   also because its session closed or lost its lease; an execution that has passed its deadline; and a speculative
   run that has taken long while a request waits.
2. No thread of this process can cancel a single op that passes the deadline. The executor's timer ends the process.
3. An execution may allocate what it is charged with, and a margin for the temporary memory of ops. RLIMIT_DATA enforces
   it: an allocation beyond it fails, and so does only the op that asked for it. On CUDA see NOTE [Reserve].
4. OpenMP aborts the process when it can't create a thread. So its threads are created before the limit is set, and a
   program uses one number of threads throughout.
5. The process keeps freed memory for the next step (see `heap`). It returns that memory to the system before an
   execution that might otherwise take the process beyond its budget.
"""

import math
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from time import monotonic

import torch

from backhaul_runtime.errors import BackhaulError, ReplayError
from backhaul_server.worker.engine.device_memory import DeviceMemory
from backhaul_server.worker.engine.heap import return_freed_memory

_MARGIN_BYTES, _MARGIN_PART = 64 << 20, 10
_RETAINED_BYTES = 100 << 20
_GRAIN = 1 << 15  # elements for which torch takes another thread
_PAGE = resource.getpagesize()
_RESIDENT, _SHARED, _DATA = 1, 2, 5  # fields of statm


class ExecutionMemory:
    """The memory limit of this process's runs. Any thread may construct it; the executor's thread alone uses it.

    Args:
        budget_bytes: The worker's whole memory budget, in bytes.
    """

    def __init__(self, budget_bytes: int) -> None:
        self._margin_bytes = _MARGIN_BYTES + budget_bytes // _MARGIN_PART
        self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        self._most_bytes = self._private_bytes() + budget_bytes + budget_bytes // _MARGIN_PART + _RETAINED_BYTES
        self._threads = 0

    def begin(self, charged_bytes: int) -> int:
        """Prepares an execution that is charged with so many bytes (Rule 5). Returns the limit for `limited`."""
        if self._private_bytes() + charged_bytes > self._most_bytes:
            return_freed_memory()
        return self._fields()[_DATA] + charged_bytes + self._margin_bytes

    @contextmanager
    def limited(self, most_bytes: int, threads: int) -> Iterator[None]:
        """Makes allocations fail that would take the process's data beyond `most_bytes` (Rules 3 and 4)."""
        if threads != self._threads:
            before = self._fields()[_DATA]
            torch.set_num_threads(threads)
            torch.empty(threads * _GRAIN, dtype=torch.uint8).fill_(0)
            self._threads = threads
            most_bytes += max(0, self._fields()[_DATA] - before)
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        if soft != resource.RLIM_INFINITY:
            most_bytes = min(most_bytes, soft)
        resource.setrlimit(resource.RLIMIT_DATA, (most_bytes, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))

    def _private_bytes(self) -> int:
        fields = self._fields()
        return fields[_RESIDENT] - fields[_SHARED]

    def _fields(self) -> list[int]:
        return [_PAGE * int(field) for field in os.pread(self._statm, 128, 0).split()]


class Bounds:
    """The deadline and the memory limit of a segment's runs, one after the other.

    Args:
        limit_s: Seconds that each execution may take.
        memory: The memory limit of executions; None if something else limits their memory.
    """

    __slots__ = ("_deadline", "_error", "_limit_s", "_memory", "_most_bytes", "_must_yield")

    def __init__(self, limit_s: float = math.inf, memory: ExecutionMemory | DeviceMemory | None = None) -> None:
        self._memory = memory
        self._error: BackhaulError | None = None
        self._deadline, self._limit_s = math.inf, limit_s
        self._must_yield: Callable[[], bool] | None = None
        self._most_bytes = 0

    def begin(self, charged_bytes: int, must_yield: Callable[[], bool] | None = None) -> None:
        """Begins an execution in the calling thread, which must be the executor's.

        Args:
            charged_bytes: The bytes that the execution is charged with.
            must_yield: Returns whether a speculative execution must end because requests wait; None for a requested
                execution.
        """
        self._deadline, self._must_yield = monotonic() + self._limit_s, must_yield
        if self._memory is not None:
            self._most_bytes = self._memory.begin(charged_bytes)

    def set(self, error: BackhaulError) -> None:
        """Ends the present run and all later ones with this error. Any thread may call it."""
        self._error = error

    def check(self) -> None:
        """Raises the error given to `set`, or ReplayError for an execution that ends for another reason (Rule 1)."""
        if self._error is not None:
            # A copy, because a raised error refers to the execution's graph, whose hooks refer to this object: the
            # garbage collector cannot free such a cycle.
            raise copy(self._error)
        if monotonic() > self._deadline:
            raise ReplayError(
                f"the execution was ended after {self._limit_s:g} s: make segments smaller, or start the worker with a "
                "larger --execution-limit"
            )
        if self._must_yield is not None and self._must_yield():
            raise ReplayError("a speculative execution was cancelled because requests wait")

    @contextmanager
    def working(self, threads: int) -> Iterator[None]:
        """Limits the memory of ops in a part of the execution that began last. The ops run on this many threads."""
        if self._memory is None:
            yield
        else:
            with self._memory.limited(self._most_bytes, threads):
                yield
