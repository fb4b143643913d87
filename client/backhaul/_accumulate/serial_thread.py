"""A thread that works for an accumulation block, safe from Ctrl-C unlike an executor: NOTE [Interrupts]."""

import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from backhaul_runtime.process.latch import Promise
from backhaul_runtime.process.threads import only_in

T = TypeVar("T")


class SerialThread:
    """A daemon thread that calls functions one after the other. Thread-safe.

    Raises:
        RuntimeError: The interpreter is shutting down and starts no more threads.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Promise[Any]] | None] = queue.SimpleQueue()
        self._is_ending = False
        self._thread = threading.Thread(target=self._serve, name="backhaul-deferred", daemon=True)
        self._thread.start()

    def submit(self, function: Callable[[], T]) -> Promise[T]:
        """Queues the call of a function. Returns the promise of its result."""
        promise = Promise[T]()
        self._calls.put((function, promise))
        return promise

    def end(self) -> None:
        """Ends the thread after the call that runs. Calls that have not begun fail with a RuntimeError."""
        self._is_ending = True
        self._calls.put(None)
        self._thread.join()

    @only_in("backhaul-deferred")
    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            function, promise = call
            try:
                if self._is_ending:
                    raise RuntimeError("the thread was ended before this call began")
                promise.set_result(function())
            except BaseException as error:  # whoever waits for the promise gets it
                promise.set_error(error)
            del call, function, promise  # nothing of the last call stays alive while this thread waits
