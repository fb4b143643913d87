"""Uploads tensors over several connections, see NOTE [Stripes] in backhaul_runtime.wire.stripes."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import grpc
from google.protobuf.message import Message

from backhaul._worker_client.connection.calls import call_unary
from backhaul._worker_client.connection.deadlines import LONGEST_S, SLICE_S, Liveness
from backhaul._worker_client.connection.lanes import LANE_LOST, Lane
from backhaul_proto.v1 import tensor_pb2
from backhaul_runtime.errors import BackhaulError, WorkerLostError
from backhaul_runtime.wire.splicing import Batch, encode, encode_all
from backhaul_runtime.wire.stripes import InTurns, stripes
from backhaul_runtime.wire.tensor_batches import OutgoingTensor

LANE_SILENCE = 0.5
"""The part of `silence_s` without progress after which unfinished lanes count as stalled. It is less than 1, so that an
upload is repeated before those who wait for it count the worker as silent."""


class StripedUpload:
    """One upload over the main connection and lanes.

    Args:
        method: PutTensors on the main connection.
        lanes: The lanes to use, all of which have joined.
        broke: Called with each lane that has failed.
        silence_s: Seconds without progress after which the upload ends.
        note: Called with the size of each message that gRPC takes, in bytes. Several threads call it.
    """

    def __init__(
        self,
        method: Any,
        lanes: Sequence[Lane],
        broke: Callable[[Lane], None],
        silence_s: float,
        note: Callable[[int], None],
    ) -> None:
        self._method = method
        self._lanes = lanes
        self._broke = broke
        self._silence_s = silence_s
        self._note = note
        # Of this upload alone. Those of the whole connection would hide a stalled lane while other uploads progress.
        self._watch = Liveness(silence_s)
        self._calls: dict[Lane, Any] = {}
        self._taken = self._taken_before = self._quiet_slices = 0

    def put(self, session: str, number: int, outgoing_tensors: Sequence[OutgoingTensor]) -> list[bytes]:
        """Sends tensors, and waits until the worker has them. Returns their addresses.

        Raises:
            WorkerError: The worker rejected the tensors.
            WorkerLostError: The worker was silent, or the main connection broke. With the status `LANE_LOST`, a lane is
                the only known cause.
        """
        declaring, batches = stripes(outgoing_tensors)
        pieces = InTurns(batches)
        first = tensor_pb2.PutTensorsRequest(session=session, stripes=number)
        main = encode_all(itertools.chain((declaring,), pieces), first.TENSORS_FIELD_NUMBER, first)
        named = tensor_pb2.PutStripesRequest(session=session, stripes=number)
        try:
            for lane in self._lanes:
                self._begin(lane, self._counted(_messages(pieces, named)))
            answer = call_unary(self._method, self._counted(main), self._silence_s, self._watch, check=self._check)
            return list(answer.addresses)
        finally:
            for call in self._calls.values():
                call.cancel()  # has no effect on a call that has ended

    def _begin(self, lane: Lane, messages: Iterator[bytes]) -> None:
        try:
            self._calls[lane] = lane.put.future(messages, timeout=LONGEST_S)
        except ValueError:  # another thread has closed the channel; nothing was taken from the pieces
            self._broke(lane)

    def _counted(self, messages: Iterable[bytes]) -> Iterator[bytes]:
        for message in messages:
            self._taken += 1  # a lost increment of another thread only delays the notice
            self._watch.sign()
            self._note(len(message))
            yield message

    def _check(self) -> None:
        """Looks for lanes that have failed, every SLICE_S seconds."""
        failed = [lane for lane, call in self._calls.items() if call.done() and _has_failed(call)]
        if failed:
            raise self._lost(failed)
        self._quiet_slices = self._quiet_slices + 1 if self._taken == self._taken_before else 0
        self._taken_before = self._taken
        if self._quiet_slices * SLICE_S >= LANE_SILENCE * self._silence_s:
            unfinished = [lane for lane, call in self._calls.items() if not call.done()]
            if unfinished:
                raise self._lost(unfinished)

    def _lost(self, lanes: Sequence[Lane]) -> WorkerLostError:
        for lane in lanes:
            self._broke(lane)
        return WorkerLostError(f"{len(lanes)} of {len(self._lanes)} further connections broke", status=LANE_LOST)


def _messages(pieces: Iterable[Batch], named: Message) -> Iterator[bytes]:
    """Yields the messages of a lane, of which the first names the upload. A lane without pieces sends nothing."""
    rest = named.SerializeToString()
    for batch in pieces:
        yield encode(batch, tensor_pb2.PutStripesRequest.TENSORS_FIELD_NUMBER, rest)
        rest = b""


def _has_failed(call: Any) -> bool:
    try:
        return isinstance(call.result(), BackhaulError)
    except (grpc.RpcError, grpc.FutureCancelledError):
        return True
