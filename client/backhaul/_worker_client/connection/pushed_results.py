"""Results that a worker sends before they are requested.

NOTE [Ahead]
1. After the backward of a segment, a worker continues with the backward of its predecessor. It pushes the result with
   everything that the backward started from. Only a request for exactly that backward takes the result.
2. This is an optimization, as NOTE [Short] is: a result that does not arrive, or arrives damaged, is requested as
   usual.
3. A result names the segments that the worker continues with. A request for one of those first waits a moment.
4. Results are held until they are taken, up to a limit. At the limit nothing more is read, so the worker sends no more.
   Results arrive in the order of backward. So when one is taken, those before it will not be requested, and when the
   limit is reached by others than the requested one, they will not be either.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import grpc

from backhaul_proto.v1 import segment_pb2
from backhaul_runtime.errors import TransferError
from backhaul_runtime.process.threads import only_in
from backhaul_runtime.wire.splicing import TensorMessage

PATIENCE_S = 0.02
MOST_HELD, HELD_BYTES = 64, 4 << 20


class PushedResults:
    """The pushed results of one session. The first request opens the stream, also after it broke. Thread-safe.

    Args:
        method: The method of a stub that opens the stream.
    """

    def __init__(self, method: Any) -> None:
        self._method = method
        self._changed = threading.Condition()  # guards all fields; notified when results arrive or the stream ends
        self._call: Any = None
        self._session = ""
        self._results: OrderedDict[int, TensorMessage[segment_pb2.AheadResponse]] = OrderedDict()
        self._expected: frozenset[int] = frozenset()

    def take(
        self, session: str, segment: int, start: segment_pb2.Start
    ) -> TensorMessage[segment_pb2.AheadResponse] | None:
        """Returns the pushed result of a segment's backward from a start; None if there is none (Rules 1 and 3)."""
        with self._changed:
            if self._call is None or self._session != session:
                self._open(session)
            elif segment in self._expected:
                self._changed.wait_for(lambda: segment in self._results or self._call is None, PATIENCE_S)
            if segment not in self._results:
                if self._is_full():
                    self._results.clear()
                    self._changed.notify_all()
                return None
            while True:  # Rule 4
                number, pushed = self._results.popitem(last=False)
                if number == segment:
                    break
            self._changed.notify_all()
        return pushed if pushed.message.start == start else None

    def expect(self, segments: Iterable[int]) -> None:
        """Notes the segments that the worker continues with, as a requested result named them."""
        with self._changed:
            if not self._results.keys() & (expected := frozenset(segments)):
                self._expected = expected

    def close(self) -> None:
        """Ends the stream and its thread."""
        with self._changed:
            call, self._call = self._call, None
            self._results.clear()
            self._changed.notify_all()
        if call is not None:
            call.cancel()

    def _is_full(self) -> bool:
        held_bytes = sum(pushed.size_bytes for pushed in self._results.values())
        return len(self._results) >= MOST_HELD or held_bytes >= HELD_BYTES

    def _open(self, session: str) -> None:
        if self._call is not None:
            self._call.cancel()
        self._call, self._session, self._expected = None, session, frozenset()
        self._results.clear()
        with suppress(ValueError):  # the channel is closed
            self._call = self._method(segment_pb2.AheadRequest(session=session))
            threading.Thread(target=self._read, args=(self._call,), name="backhaul-ahead", daemon=True).start()

    @only_in("backhaul-ahead")
    def _read(self, call: Any) -> None:
        with suppress(grpc.RpcError):
            for carried in call:
                if isinstance(carried, TransferError):
                    continue  # Rule 2
                with self._changed:
                    self._changed.wait_for(lambda: call is not self._call or not self._is_full())
                    if call is not self._call:
                        return
                    for pushed in _unpacked(carried):
                        self._results[pushed.message.segment] = pushed
                        self._expected = frozenset(pushed.message.result.goes_on)
                    self._changed.notify_all()
        with self._changed:
            if call is self._call:
                self._call = None
                self._changed.notify_all()


def _unpacked(carried: TensorMessage[segment_pb2.AheadResponse]) -> Iterator[TensorMessage[segment_pb2.AheadResponse]]:
    """Yields the results in a message."""
    more = [
        TensorMessage(pushed, pushed.tensors if pushed.HasField("tensors") else None, pushed.ByteSize())
        for pushed in carried.message.more
    ]
    yield replace(carried, size_bytes=carried.size_bytes - sum(pushed.size_bytes for pushed in more))
    yield from more
