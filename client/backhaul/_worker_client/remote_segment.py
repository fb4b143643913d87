"""The trainer's side of a segment that a worker stores."""

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import TypeVar

import torch
from torch import Tensor

from backhaul._backward.recheck import Rechecks
from backhaul._backward.remote_side import RemoteAnswer, StoredGradient
from backhaul._backward.value_check import Recomputed
from backhaul._observe.call_log import CallLog
from backhaul._worker_client.answers.answer_checks import check_saved, contributions_in, saved_views, wanted_outputs
from backhaul._worker_client.answers.answer_stream import AnswerStream, Messages, PushedAnswer
from backhaul._worker_client.connection.connection import Connection
from backhaul._worker_client.connection.deadlines import SLICE_S, Expected
from backhaul._worker_client.connection.worker_session import WorkerSession
from backhaul._worker_client.upload.backward_chains import SpeculativeGradient
from backhaul._worker_client.upload.segment_upload import SegmentUpload
from backhaul._worker_client.upload.uploader import Uploader
from backhaul_proto.v1 import segment_pb2
from backhaul_runtime.errors import ReplayError, TensorsMissingError, TransferError, WorkerLostError
from backhaul_runtime.process.death_queue import DeathNotice
from backhaul_runtime.program.codec import encode_state
from backhaul_runtime.tensors.deferred_digest import ContentDigests, Digest, digest_of, read
from backhaul_runtime.tensors.digest import address_of, tensor_address
from backhaul_runtime.tensors.layout import Layout, layout_of
from backhaul_runtime.torch_internals import ambient_state
from backhaul_runtime.wire.bundle import View, view_of
from backhaul_runtime.wire.protocol import CHUNK_BYTES
from backhaul_runtime.wire.tensor_batches import PLACED_BYTES, OutgoingTensor, batches

T = TypeVar("T")
Answer = tuple[segment_pb2.BackwardResult, list[Tensor], list[bytes]]
SHORT_BYTES = CHUNK_BYTES // 2
"""Gradients of up to this many bytes are sent with the request."""


def _recomputed(result: "segment_pb2.BackwardResult | segment_pb2.RecomputeResult") -> Recomputed:
    return Recomputed(list(result.digests), [list(projection.numbers) for projection in result.saved_projections])


class SavedTensors:
    """The saved tensors of a segment, as they arrive from the worker. `close` ends the transfer.

    Args:
        stream: The answer, whose result has arrived.
        result: The result of that answer, with its views.
        views: The view of a tensor of the answer that each requested tensor is, by position.
        layouts: The layouts of the requested tensors, by position.
        on_close: Called when the stream is no longer needed.
        uploader: The uploader of the segment's worker.

    Attributes:
        compared: The digests of what the worker's replay saved, or of what it returned.
    """

    def __init__(
        self,
        stream: AnswerStream,
        result: segment_pb2.RecomputeResult,
        views: Mapping[int, View],
        layouts: Mapping[int, Layout],
        on_close: Callable[[], None],
        uploader: Uploader,
    ) -> None:
        self.compared = _recomputed(result)
        self._stream = stream
        self._views = dict(views)
        self._layouts = layouts
        self._left = Counter(view.tensor_index for view in self._views.values())
        self._on_close = on_close
        self._uploader = uploader
        self._ending: DeathNotice | None = uploader.call_after(self, on_close)

    def take(self, position: int) -> Tensor:
        """Returns a requested tensor, once. It may lie in lent shared memory, so it must not be written to.

        Waits within the deadlines of NOTE [Bounds].

        Raises:
            TransferError: The tensor is not one that autograd saved.
            WorkerLostError: The tensor did not arrive.
        """
        view = self._views.pop(position)
        received = self._stream.tensor(view.tensor_index)
        self._left[view.tensor_index] -= 1
        if not self._left[view.tensor_index]:
            self._stream.forget(view.tensor_index)
        tensor = view_of(received, view)
        check_saved(position, tensor, self._layouts[position])
        return tensor

    def close(self) -> None:
        """Cancels the stream. It may be called twice."""
        if self._ending is not None:
            self._on_close()
            self._uploader.cancel_notice(self._ending)
            self._ending = None


class SavedSegment:
    """A segment that was given to an uploader. When this object dies, the worker releases the segment.

    Args:
        connection: The connection to the segment's worker.
        uploader: The uploader of that connection.
        save: The upload of the segment, as it was queued.
        log: The log of the call, for bytes and times.
        expected_s: Returns the seconds that a replay with its backward should take.
        reached: Called when a backward requests the segment. Returns the numbers of the segments that it will probably
            request next.
        rechecks: What the session rechecks; None if it rechecks nothing.
        accelerator: The CUDA device that the segment was computed on; None for one on the host alone.

    Attributes:
        rechecks: What the session rechecks, as given.
        expected: The gradients that the worker has predicted, by output.
    """

    def __init__(
        self,
        connection: Connection,
        uploader: Uploader,
        save: SegmentUpload,
        log: CallLog,
        expected_s: Expected,
        reached: Callable[[], Sequence[int]],
        rechecks: Rechecks | None = None,
        accelerator: torch.device | None = None,
    ) -> None:
        self._connection = connection
        self._uploader = uploader
        self._save = save
        self._log = log
        self._expected_s = expected_s
        self._reached = reached
        self.rechecks = rechecks
        self._accelerator = accelerator
        self.expected: dict[int, SpeculativeGradient] = {}
        self._backwards = itertools.count(1)
        save.owner = uploader.release_after(self, save.worker_session, save.segment)

    @property
    def worker_session(self) -> WorkerSession:
        """The worker session that stores the segment."""
        return self._save.worker_session

    @property
    def worker(self) -> str:
        """See `RemoteSegment`."""
        return self._connection.name

    @property
    def is_exact(self) -> bool:
        """See `RemoteSegment`."""
        return not self._save.wants_projections

    def expel(self, why: str) -> None:
        """See `RemoteSegment`."""
        self._connection.expel(why)

    @property
    def uploader(self) -> Uploader:
        """The uploader of the segment's worker."""
        return self._uploader

    @property
    def number(self) -> int:
        """The number of the segment in its session."""
        return self._save.segment

    def backward(
        self,
        gradients: Mapping[int, Tensor | StoredGradient],
        state: ambient_state.State,
        summed: Collection[int],
        due: Sequence[tuple[int, Layout]],
        may_stay: Mapping[int, Tensor],
        unsent: Collection[int] = (),
        upcoming: Sequence[int] | None = None,
        outputs: Sequence[Layout] = (),
        *,
        checks_bytes: bool,
    ) -> RemoteAnswer:
        """See `RemoteSegment`."""
        contents, named, own = ContentDigests(), dict[int, Digest](), list[tuple[int, Tensor, Layout]]()
        for position, gradient in gradients.items():
            if isinstance(gradient, StoredGradient):
                named[position] = gradient.address
                continue
            layout = layout_of(gradient)
            named[position] = digest_of(tensor_address, layout, contents.take(gradient, layout))
            own.append((position, gradient, layout))
        addresses = {position: read(address) for position, address in named.items()}  # a device is waited for once
        outgoing_tensors = [OutgoingTensor(gradient, layout, addresses[position]) for position, gradient, layout in own]
        for position, prediction in self.expected.items():
            prediction.check(addresses.get(position))
        start = segment_pb2.Start(
            gradients=[
                segment_pb2.OutputGradient(output=position, tensor=address)
                for position, address in sorted(addresses.items())
            ],
            ambient_state=encode_state(state),
            wants_digests=checks_bytes,
            summed_sources=sorted(summed),
            wanted_outputs=range(len(outputs)),
            wants_contribution_digests=bool(outputs),
        )
        answer_bytes = sum(
            layout.gradient_bytes for source, layout in due if source not in may_stay and source not in unsent
        )
        key, expected = self._key(), self._reached()
        request = segment_pb2.Request(
            session=self.worker_session.session,
            backward=segment_pb2.BackwardRequest(
                key=key,
                start=start,
                upcoming_segments=expected if upcoming is None else upcoming,
                expected_s=self._expected_s() or 0.0,
                slots=[segment_pb2.Slot(source=source, slot=id(parameter)) for source, parameter in may_stay.items()],
                pass_number=self.number if may_stay else 0,  # segments share no slot in a pass, so any number will do
                unsent_sources=sorted(unsent),
            ),
        )

        def ask() -> Answer:
            try:
                return self._ask(request, outgoing_tensors, answer_bytes)
            except TensorsMissingError:  # the worker has evicted gradients that the uploader still counts as stored
                self._log.retries += 1
                self._uploader.stored.unlearn(outgoing.address for outgoing in outgoing_tensors)
                return self._ask(request, outgoing_tensors, answer_bytes)

        asked_s = perf_counter()
        result, tensors, received = self._repeated(ask)
        took_s = perf_counter() - asked_s
        if checks_bytes and list(map(address_of, tensors)) != list(result.tensor_digests):
            raise TransferError("gradients differ from those that the worker computed: they were damaged in transit")
        contributions = contributions_in(result, tensors, due, summed, may_stay)
        sources = {contribution.source for contribution in result.contributions if contribution.uncollected}
        self._uploader.stored.learn(self.worker_session, received)
        stored = self._chained(result)

        def commit(round_number: int) -> set[int]:
            if sources:
                parameters = [may_stay[source] for source in sources]
                self._uploader.uncollected.commit(self.worker_session, key, parameters, round_number)
            return sources

        values, digests = wanted_outputs(result.outputs, outputs), [one.digest for one in result.contributions]
        return RemoteAnswer(_recomputed(result), contributions, stored, commit, took_s, values, digests)

    def _ask(self, request: segment_pb2.Request, gradients: Sequence[OutgoingTensor], answer_bytes: int) -> Answer:
        """Returns the answer to a backward, which the worker may have pushed already."""
        backward, pushed = request.backward, None
        exchange = self._connection.stubs(self.worker_session).exchange
        if answer_bytes <= CHUNK_BYTES and not backward.slots:
            pushed = exchange.take_pushed(self.number, backward.start)
        if pushed is not None:
            request.answer = 0
            stream = self._stream(PushedAnswer(pushed), request)
        else:
            missing = self._uploader.stored.missing(self.worker_session, gradients)
            if sum(outgoing.layout.payload_bytes for outgoing in missing) > SHORT_BYTES:
                self._uploader.tensors.put(self.worker_session, missing, self._sent)
                missing = []
            stream = self._asked(request, answer_bytes, missing)
        try:
            result = stream.result().backward
            if pushed is None:
                exchange.expect(result.goes_on)
            receiver = stream.rest()
            tensors = receiver.tensors()
            self._connection.ran(self._expected_s() or 0.0, result.timing.recompute_s + result.timing.backward_s)
            self._log.answered(result.timing, self._connection.clock_offset_s)
            return result, tensors, receiver.addresses()
        finally:
            self._closed(stream)

    def _chained(self, result: segment_pb2.BackwardResult) -> dict[int, StoredGradient]:
        addresses = {gradient.source: gradient.tensor for gradient in result.chained_gradients}
        self._uploader.stored.learn(self.worker_session, addresses.values())
        for predecessor in self._save.predecessors:
            segment = predecessor.segment()
            if segment is not None and predecessor.source in addresses:
                segment.expected[predecessor.output] = SpeculativeGradient(addresses[predecessor.source], predecessor)
        return {source: StoredGradient(address) for source, address in addresses.items()}

    def drifted(self, drift: float) -> None:
        """See `RemoteSegment`."""
        self._connection.drift = max(self._connection.drift, drift)

    def recompute(self, wanted: Mapping[int, Layout]) -> "SavedTensors":
        """See `RemoteSegment`."""
        request = segment_pb2.Request(
            session=self.worker_session.session,
            recompute=segment_pb2.RecomputeRequest(
                key=self._key(),
                positions=wanted,
                upcoming_segments=self._reached(),
                expected_s=self._expected_s() or 0.0,
            ),
        )
        return self._repeated(partial(self._ask_for_saved, request, wanted))

    def _ask_for_saved(self, request: segment_pb2.Request, wanted: Mapping[int, Layout]) -> SavedTensors:
        answer_bytes = sum(layout.payload_bytes for layout in wanted.values())
        stream = self._asked(request, answer_bytes, is_lent=True)
        try:
            result = stream.result().recompute

            def close() -> None:
                self._closed(stream)
                self._log.answered(result.timing, self._connection.clock_offset_s)

            return SavedTensors(stream, result, saved_views(result.views, wanted), wanted, close, self._uploader)
        except BaseException:
            self._closed(stream)
            raise

    def _key(self) -> segment_pb2.OperationKey:
        return segment_pb2.OperationKey(segment=self._save.segment, backward=next(self._backwards))

    def _repeated(self, ask: Callable[[], T]) -> T:
        """Makes a request, and repeats it once after a broken connection or damage. Its key makes both the same."""
        self._wait_until_saved()
        try:
            return ask()
        except ReplayError:
            for predecessor in self._save.predecessors:
                if predecessor.derived is not None:
                    predecessor.speculation.can_derive = False
            raise
        except (TransferError, WorkerLostError) as error:
            if not self._connection.may_repeat(self.worker_session, error):
                raise
        self._log.retries += 1
        try:
            return ask()
        except WorkerLostError as error:
            self._connection.trouble(self.worker_session, error)
            raise

    def _wait_until_saved(self) -> None:
        """Waits for the uploader, which ends by itself if the worker stops taking bytes (Rule 4 of NOTE [Bounds])."""
        while not self._save.saved.wait(SLICE_S):
            self._connection.stubs(self.worker_session)
        self._save.saved.result()
        self._uploader.free_sent()

    @property
    def _shares_memory(self) -> bool:
        """Whether the large tensors of answers go through shared memory. Those of an accelerator can't."""
        return self.worker_session.memory is not None and self._accelerator is None

    def _asked(
        self,
        request: segment_pb2.Request,
        answer_bytes: int,
        tensors: Sequence[OutgoingTensor] = (),
        *,
        is_lent: bool = False,
    ) -> AnswerStream:
        """Sends a request, with short tensors, whose answer is expected to have so many bytes."""
        memory = self.worker_session.memory
        request.answer = memory.answer() if memory is not None else 0
        is_large = answer_bytes > (PLACED_BYTES if self._shares_memory else CHUNK_BYTES)
        exchange = self._connection.stubs(self.worker_session).exchange
        pending = exchange.ask(request, next(batches(tensors), None), is_large=is_large)
        self._sent(pending.sent_bytes)
        return self._stream(pending, request, is_lent=is_lent)

    def _stream(self, messages: Messages, request: segment_pb2.Request, *, is_lent: bool = False) -> AnswerStream:
        memory = self.worker_session.memory
        return AnswerStream(messages, self._expected_s, memory, request.answer, self._accelerator, is_lent=is_lent)

    def _closed(self, stream: AnswerStream) -> None:
        stream.close()
        self._received(stream.received_bytes)

    def _sent(self, size_bytes: int) -> None:
        self._log.traffic(up_bytes=size_bytes)
        self._connection.traffic.add(up_bytes=size_bytes)

    def _received(self, size_bytes: int) -> None:
        self._log.traffic(down_bytes=size_bytes)
        self._connection.traffic.add(down_bytes=size_bytes)
