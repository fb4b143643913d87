"""Results that a worker sends before they are asked for.

NOTE [Ahead]
1. A worker goes on from one segment's backward into the one before it. What that gives it sends by itself, with all
   that it started from. Only a request for just that takes it.
2. It is a short cut, as NOTE [Short]: what does not come, or comes damaged, is asked for as if there were none of
   this.
3. A result says which segments the worker goes on into next. Who asks for one of those waits a moment before it asks.
4. What comes is held until it is taken, so much at most: then nothing more is read, and the worker sends no more. It
   comes in the order of backward: what came before one that is taken will not be, nor what fills the room while another
   is asked for.
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
from backhaul_runtime.wire.splicing import TensorMessage

PATIENCE_S = 0.02
MOST_HELD, HELD_BYTES = 64, 4 << 20


class PushedResults:
    """Of the session that asks. Opened by the first that does, and again after it broke. `close` it.

    Args:
        method: The method of a stub that opens the stream.
    """

    def __init__(self, method: Any) -> None:
        self._method = method
        self._changed = threading.Condition()
        self._call: Any = None
        self._session = ""
        self._results: OrderedDict[int, TensorMessage[segment_pb2.AheadResponse]] = OrderedDict()
        self._expected: frozenset[int] = frozenset()

    def take(
        self, session: str, segment: int, start: segment_pb2.Start
    ) -> TensorMessage[segment_pb2.AheadResponse] | None:
        """The result of a segment's backward from a start, if it came or is to come soon (Rules 1, 3)."""
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
        """What a result that was asked for says of what comes next."""
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
    """The results of a message."""
    more = [
        TensorMessage(pushed, pushed.tensors if pushed.HasField("tensors") else None, pushed.ByteSize())
        for pushed in carried.message.more
    ]
    yield replace(carried, size_bytes=carried.size_bytes - sum(pushed.size_bytes for pushed in more))
    yield from more
