"""What threads wait for together with a thread that Ctrl-C may interrupt.

NOTE [Interrupts]
1. Python handles Ctrl-C in the main thread, also when a function written in Python begins: `__exit__` of a
   `threading.Condition` for example, before it has released the lock. The lock then stays locked, and the next thread
   that takes it waits for ever. `Event`, `Semaphore` and `Barrier`, `queue.Queue` and the futures and executors of
   `concurrent.futures` contain a Condition.
2. `threading.Lock`, `threading.RLock` and `queue.SimpleQueue` are written in C. A `with` statement takes and releases
   such a lock without a moment at which Ctrl-C is handled and nobody will release it.
3. So what a training thread shares with another thread is built from these alone, in client and runtime.
"""

import queue
from math import inf
from time import monotonic
from typing import Generic, TypeVar

T = TypeVar("T")
_LOOK_S = 1.0
"""Seconds after which `wait` looks again. Only a wake-up that Ctrl-C has cut short makes a thread wait as long."""


class Latch:
    """A flag that is set once, as `threading.Event` is, but safe from Ctrl-C: NOTE [Interrupts]. Thread-safe.

    Attributes:
        is_set: Whether `set` was called.
    """

    def __init__(self) -> None:
        self.is_set = False
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()

    def set(self) -> None:
        """Sets the flag and wakes all threads that wait. It may be called again, which changes nothing."""
        self.is_set = True
        self._wakes.put(None)

    def wait(self, timeout_s: float = inf) -> bool:
        """Waits until the flag is set, for `timeout_s` at most. Returns whether it is set."""
        until_s = monotonic() + timeout_s
        while not self.is_set and (left_s := until_s - monotonic()) > 0:
            try:
                self._wakes.get(timeout=min(left_s, _LOOK_S))
            except queue.Empty:
                continue
            self._wakes.put(None)  # for the next thread that waits
        return self.is_set


class Promise(Generic[T]):
    """A result that one thread sets and others wait for, safe from Ctrl-C: NOTE [Interrupts]. Thread-safe.

    Attributes:
        error: The error that was set instead of a result.
    """

    def __init__(self) -> None:
        self._done = Latch()
        self._result: list[T] = []
        self.error: BaseException | None = None

    @property
    def is_done(self) -> bool:
        """Whether a result or an error was set."""
        return self._done.is_set

    def set_result(self, result: T) -> None:
        """Sets the result. Only one thread may set a result or an error, once."""
        self._result.append(result)
        self._done.set()

    def set_error(self, error: BaseException) -> None:
        """Sets an error, which `result` then raises."""
        self.error = error
        self._done.set()

    def wait(self, timeout_s: float = inf) -> bool:
        """Waits for a result or an error, for `timeout_s` at most. Returns whether one was set."""
        return self._done.wait(timeout_s)

    def result(self, timeout_s: float = inf) -> T:
        """Returns the result, or raises the error. Raises TimeoutError if neither was set in time."""
        if not self.wait(timeout_s):
            raise TimeoutError(f"no result was set within {timeout_s:g} s")
        try:
            if self.error is not None:
                raise self.error
            return self._result[0]
        finally:
            del self  # the traceback of the error refers to the variables of this function
