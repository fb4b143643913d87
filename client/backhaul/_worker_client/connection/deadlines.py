"""How long the trainer waits for a worker.

NOTE [Bounds]
1. Every wait ends: when the worker is silent for too long, when the execution takes too long, or when the worker's
   queue takes longer than the work would take here.
2. Silence is counted in slices during which the waiting thread was awake. So a trainer that was itself stopped or
   starved does not blame the worker.
3. The contents of a message that does not fit its checksum are unknown. A damaged answer becomes a WorkerLostError with
   the status DAMAGED; a damaged request becomes a TransferError of the worker. Either way a request of a single message
   is repeated once, and the worker joins it to the first one.
4. Limits of time begin when the worker has everything that it needs: the request follows the upload of its segment.
   The upload itself has no limit but the silence that its own calls notice. So weights may take minutes to send, and an
   upload that waits for the trainer's own device does not blame the worker.
5. The expected time of an execution follows from what forward took. As long as an accelerator has not done that
   forward, and none before it, the time is unknown and limits nothing.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from time import monotonic
from typing import Any, TypeAlias, TypeVar

from backhaul_runtime.errors import WorkerLostError
from backhaul_runtime.process.latch import Latch

T = TypeVar("T")
SLICE_S = 0.1
LONGEST_S = 3600.0
"""The deadline passed to gRPC for calls whose end the rules above decide."""
SHORTEST_EXECUTION_LIMIT_S = 5.0
"""The limit of an execution that should take less than a quarter of it. Tests that are not about it set it higher."""
SHORTEST_QUEUE_LIMIT_S = 1.0
"""The limit of the worker's queue for an execution that should take less than half of it, set higher likewise."""


class Liveness:
    """Tracks the signs of life of one call. Thread-safe: a lost increment only delays the notice of a sign."""

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._signs = 0

    def sign(self) -> None:
        """Notes a sign of life: a message arrived, or gRPC took one of ours. Any thread may call it."""
        self._signs += 1

    def wait(self, future: Any, check: Callable[[], object] = lambda: None) -> Any:
        """Returns the result of one of gRPC's futures.

        Raises WorkerLostError after too much silence, and any error of `check`.
        """
        if future.done():
            return future.result()
        done = Latch()
        future.add_done_callback(lambda _: done.set())
        seen, silent = self._signs, 0.0
        while not done.is_set:
            before = monotonic()
            if done.wait(SLICE_S):
                break
            check()
            if self._signs != seen:
                seen, silent = self._signs, 0.0
            else:
                silent += min(SLICE_S, monotonic() - before)  # Rule 2
            if silent >= self._silence_s:
                raise WorkerLostError(f"the worker was silent for {self._silence_s:g} s", status="SILENT")
        return future.result()


def with_liveness(messages: Iterable[T], watch: Liveness) -> Iterator[T]:
    """Passes messages on, and counts each message that gRPC takes as a sign of life."""
    for message in messages:
        watch.sign()
        yield message


Expected: TypeAlias = Callable[[], float | None]
"""Returns the seconds that work should take; None while they are unknown (Rule 5)."""


def longest_execution_s(expected_s: float | None) -> float:
    """Returns the seconds to wait for work that should take `expected_s`; infinity while that is unknown (Rule 5)."""
    return math.inf if expected_s is None else max(SHORTEST_EXECUTION_LIMIT_S, 4 * expected_s)


def longest_queue_s(expected_s: float | None) -> float:
    """Returns the seconds that other work may take before work of `expected_s`; see `longest_execution_s`."""
    return math.inf if expected_s is None else max(SHORTEST_QUEUE_LIMIT_S, 2 * expected_s)
