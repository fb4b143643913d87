"""Results that a worker sends before they are requested.

NOTE [Pushes]
1. After the backward of a segment, a worker continues with the backward of its predecessor. It pushes the result with
   everything that the backward started from. Only a request for exactly that backward takes the result.
2. A result that does not arrive is requested as usual. Nothing is pushed until the first backward has looked for one.
3. A result names the segments that the worker continues with. A request for one of those first waits a moment.
4. The worker stops pushing while the trainer holds MOST_PUSHED results or PUSHED_BYTES, so that the stream, which is
   shared with answers, is always read. Each request tells how many results were taken or dropped. Results arrive in the
   order of backward. So when one is taken, those before it will not be requested, and when the limit is reached by
   others than the requested one, they will not be either.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterable
from time import monotonic

from backhaul_proto.v1 import segment_pb2
from backhaul_runtime.process.latch import Latch
from backhaul_runtime.wire.protocol import MOST_PUSHED, PUSHED_BYTES
from backhaul_runtime.wire.splicing import TensorMessage

PATIENCE_S = 0.02

Pushed = TensorMessage[segment_pb2.Answer]


class PushedResults:
    """The pushed results of one stream that are held. Thread-safe.

    Attributes:
        taken: How many results were taken or dropped (Rule 4).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards all fields
        self._changed = Latch()  # set when results arrive next or the stream ends: NOTE [Interrupts]
        self._results: OrderedDict[int, Pushed] = OrderedDict()
        self._expected: frozenset[int] = frozenset()
        self._has_ended = False
        self.taken = 0

    def take(self, segment: int, start: segment_pb2.Start) -> Pushed | None:
        """Returns the pushed result of a segment's backward from a start; None if there is none (Rules 1 and 3)."""
        if segment in self._expected:
            self._wait_for(segment)
        with self._lock:
            if segment not in self._results:
                if self._is_full():
                    self._drop()
                return None
            while True:  # Rule 4
                number, pushed = self._results.popitem(last=False)
                self.taken += 1
                if number == segment:
                    break
        return pushed if pushed.message.start == start else None

    def expect(self, segments: Iterable[int]) -> None:
        """Notes the segments that the worker continues with, as a requested result named them."""
        with self._lock:
            if not self._results.keys() & (expected := frozenset(segments)):
                self._expected = expected

    def arrived(self, pushed: Iterable[Pushed]) -> None:
        """Holds results that were pushed. If a worker pushes far more than it may, what it pushed before is dropped."""
        with self._lock:
            for result in pushed:
                if self._is_full(times=2):
                    self._drop()
                segment = result.message.key.segment
                self.taken += segment in self._results  # the later one takes its place
                self._results[segment] = result
                self._expected = frozenset(result.message.backward.goes_on)
            changed, self._changed = self._changed, Latch()
        changed.set()

    def end(self) -> None:
        """Drops all results: nothing more arrives."""
        with self._lock:
            self._has_ended = True
            self._drop()
        self._changed.set()

    def _wait_for(self, segment: int) -> None:
        """Waits for the result of a segment or the end of the stream, for PATIENCE_S at most."""
        until_s = monotonic() + PATIENCE_S
        while (left_s := until_s - monotonic()) > 0:
            with self._lock:
                if segment in self._results or self._has_ended:
                    return
                changed = self._changed
            changed.wait(left_s)

    def _is_full(self, times: int = 1) -> bool:
        held_bytes = sum(pushed.size_bytes for pushed in self._results.values())
        return len(self._results) >= times * MOST_PUSHED or held_bytes >= times * PUSHED_BYTES

    def _drop(self) -> None:
        self.taken += len(self._results)
        self._results.clear()
