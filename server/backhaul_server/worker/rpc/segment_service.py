"""The RPCs for segments: save, recompute, run backward, release, and collect gradient sums.

The servicer translates between protobuf and the engine. `Worker` decides about sessions, `SegmentSaver` about what is
saved, and `SegmentEngine` about requests and their results.
"""

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from backhaul_proto.v1 import segment_pb2, tensor_pb2
from backhaul_runtime.errors import BackhaulError, BudgetError, ProgramError, TransferError
from backhaul_runtime.program.codec import decode_state
from backhaul_runtime.tensors.staging import DeviceMoment
from backhaul_runtime.wire.layout_codec import decode_layout
from backhaul_runtime.wire.protocol import CHUNK_BYTES, PROGRESS_INTERVAL_S
from backhaul_runtime.wire.shared_memory import shared_bytes
from backhaul_runtime.wire.splicing import TensorMessage
from backhaul_runtime.wire.tensor_batches import OutgoingTensor, SharedWriter, batches
from backhaul_server.worker.audit import AuditLog
from backhaul_server.worker.engine import executions
from backhaul_server.worker.engine.executions import BackwardInputs, ExecutionResult
from backhaul_server.worker.engine.gradient_sums import GradientsToKeep
from backhaul_server.worker.engine.segment import Operation, Segment, SegmentRequest, SessionState, result_of
from backhaul_server.worker.engine.segment_engine import SegmentEngine
from backhaul_server.worker.engine.segment_machine import Key
from backhaul_server.worker.engine.worker import Worker
from backhaul_server.worker.rpc.calls import Context, Servicer, answered_error, exchange
from backhaul_server.worker.rpc.exchange import OpenExchange
from backhaul_server.worker.rpc.meter import RpcMeter
from backhaul_server.worker.rpc.push_credit import PushCredit
from backhaul_server.worker.rpc.segment_answers import (
    backward_answer,
    joined,
    message_of,
    messages_of,
    pushed_answer,
    recompute_answer,
)
from backhaul_server.worker.rpc.uploads import TensorUpload

MOST_OUTPUTS = 16
"""The most outputs whose contents a request may want."""

MANY_PARTS = 2_048
"""A result with more digests, views and gradients is encoded by a thread beside the event loop, and is not pushed."""


class SegmentServicer(Servicer):
    """Implements the service of segments.

    Args:
        worker: Holds the sessions and their saved segments.
        engine: Runs requests for these segments.
        meter: Counts calls and bytes.
        audit: Gets an entry for each request that is denied.
    """

    def __init__(self, worker: Worker, engine: SegmentEngine, meter: RpcMeter, audit: AuditLog) -> None:
        super().__init__(worker, meter, audit)
        self._engine = engine
        self._waits = worker.device_waits

    @exchange
    async def Exchange(  # noqa: N802  gRPC's name
        self, requests: AsyncIterator[TensorMessage[segment_pb2.Request] | BackhaulError], context: Context
    ) -> None:
        """Answers the requests of one session, see NOTE [Exchange]."""
        await OpenExchange(self, context, self._answers, self._push).serve(requests)

    def _answers(
        self, session: SessionState, number: int, carried: TensorMessage[segment_pb2.Request]
    ) -> AsyncGenerator[segment_pb2.Answer | bytes]:
        """Returns the messages of the answer to a request of an exchange."""
        match carried.message.WhichOneof("request"):
            case "save":
                return self._saved(session, number, carried)
            case "backward":
                return self._backward(session, number, carried)
            case "recompute":
                return self._recompute(session, number, carried.message)
            case "release":
                return self._released(session, number, carried.message.release)
            case "collect_gradients":
                return self._collected(session, number, carried.message)
            case "fetch_sources":
                return self._fetched(session, number, carried.message)
        raise TransferError("a request asks for nothing that this worker knows")

    async def _saved(
        self, session: SessionState, number: int, carried: TensorMessage[segment_pb2.Request]
    ) -> AsyncGenerator[segment_pb2.Answer | bytes]:
        """Saves a segment, or says which tensors and whether the program are missing."""
        stored = await self._stored(session, carried)
        try:
            result = self._save(session, carried, stored)
        except BackhaulError as error:
            # The trainer must learn that its tensors were stored all the same: they may lie in its shared memory.
            result = segment_pb2.SaveResult(error=answered_error(error).to_bytes())
        result.stored[:] = stored
        yield segment_pb2.Answer(number=number, key=carried.message.save.key, save=result)

    async def _stored(self, session: SessionState, carried: TensorMessage[Any]) -> list[bytes]:
        """Stores all tensors of a request, or none if one is invalid. Returns their addresses."""
        with TensorUpload(self.worker) as upload:
            upload.set_session(session)
            await upload.add(carried)
            self.meter.received(shared_bytes(carried.tensors))
            return await upload.stored()

    def _save(
        self, session: SessionState, carried: TensorMessage[segment_pb2.Request], stored: Sequence[bytes]
    ) -> segment_pb2.SaveResult:
        request = carried.message.save
        declarations = carried.tensors.declarations if carried.tensors is not None else ()
        # A source without an address is the next tensor of the message whose declaration has none either.
        unnamed = (address for address, declared in zip(stored, declarations, strict=True) if not declared.address)
        sources = [address or next(unnamed, b"") for address in request.sources]
        self.worker.store.disown(session, request.superseded)
        program_missing, missing = self.worker.saver.save(
            session,
            request.key.segment,
            request.program,
            sources,
            request.transient_sources,
            request.generator_states,
            request.name,
            request.wants_projections,
            {origin.source: (origin.segment, origin.output) for origin in request.predecessors},
            {
                origin.source: decode_layout(origin.derived)
                for origin in request.predecessors
                if origin.HasField("derived")
            },
            compares_outputs=request.compares_outputs,
            is_predicted=request.predicted,
            after_release=request.after_release,
        )
        return segment_pb2.SaveResult(program_missing=program_missing, missing_tensors=missing)

    async def _recompute(
        self, session: SessionState, number: int, request: segment_pb2.Request
    ) -> AsyncGenerator[segment_pb2.Answer | bytes]:
        """Yields progress, then the requested saved tensors in the order of the request."""
        recompute = request.recompute
        segment = self.worker.segment(session, recompute.key.segment)
        key, positions = Key("recompute", recompute.key.backward), tuple(recompute.positions)
        if len(set(positions)) < len(positions):
            raise ProgramError(f"a saved tensor of {segment.name} is requested twice in one request")
        perform = partial(executions.recompute, positions=positions)
        head = segment_pb2.Answer(number=number, key=recompute.key)
        with self.worker.answers.answering(segment, key):
            submitted = self._engine.request(segment, key, lambda: perform, recompute.expected_s)
            self._engine.announced(session, recompute.upcoming_segments)
            async for progress in self._wait(segment, submitted.answer):
                yield segment_pb2.Answer(number=number, key=recompute.key, progress=progress)
            result = result_of(submitted.answer)
            encoded = await _encoded(result, partial(recompute_answer, head, segment, submitted))
            async for message in self._sent(session, request, head, encoded, result.bundle.tensors):
                yield message

    async def _backward(
        self, session: SessionState, number: int, carried: TensorMessage[segment_pb2.Request]
    ) -> AsyncGenerator[segment_pb2.Answer | bytes]:
        """Yields progress, then digests and contributions."""
        await self._stored(session, carried)
        request, key = carried.message, carried.message.backward.key
        head = segment_pb2.Answer(number=number, key=key)
        with self._requested(session, request.backward) as (segment, submitted):
            async for progress in self._wait(segment, submitted.answer):
                yield segment_pb2.Answer(number=number, key=key, progress=progress)
            result = result_of(submitted.answer)
            encoded = await _encoded(result, partial(backward_answer, head, segment, submitted))
            async for message in self._sent(session, request, head, encoded, result.bundle.tensors):
                yield message

    async def _sent(
        self,
        session: SessionState,
        request: segment_pb2.Request,
        head: segment_pb2.Answer,
        encoded: bytes,
        outgoing_tensors: Sequence[OutgoingTensor],
    ) -> AsyncGenerator[bytes]:
        """Yields the messages of a result, and charges the session for them.

        Args:
            session: The session of the request.
            request: The request that the result answers.
            head: The number and the key of the answer.
            encoded: The answer without its tensors.
            outgoing_tensors: The tensors of the result.
        """
        placed = batches(outgoing_tensors, self._shared_writer(session, request.answer))
        with self.worker.answers.sending(session, sum(outgoing.layout.span_bytes for outgoing in outgoing_tensors)):
            async for message in messages_of(placed, head, encoded, self._waits):
                yield message

    async def _push(self, session: SessionState, credit: PushCredit) -> AsyncGenerator[bytes]:
        """Yields results of speculative backwards, as messages to push, while the trainer has room for them.

        Ends with the session, and when another stream takes its pushes over.
        """
        waiting = session.open_push_queue()
        try:
            while True:
                await credit.room()
                if (segment := await waiting.get()) is None:
                    return
                async for message in joined(self._pushed(itertools.chain((segment,), _ready(waiting, credit)), credit)):
                    # Without memory to send it, the message is dropped: the trainer then asks for the backward.
                    with suppress(BudgetError), self.worker.answers.sending(session, len(message)):
                        yield message
        finally:
            if session.push_queue is waiting:
                session.close_push_queue()

    async def _pushed(self, segments: Iterable[Segment], credit: PushCredit) -> AsyncGenerator[bytes]:
        """Yields the speculative backwards of segments, except those that are gone or too large to push.

        They are not sealed yet, because several of them share one message.
        """
        for segment in segments:
            backward = self._engine.take_pushed(segment, CHUNK_BYTES, MANY_PARTS)
            if backward is not None:
                inputs, result = backward
                answer = pushed_answer(segment, inputs, result)
                try:  # while a thread waits, the store may drop the result: what is sent is charged, too
                    with self.worker.answers.sending(segment.session, result.bundle.size_bytes):
                        await self._waits.computed(_made(result.bundle.tensors))
                        batch = next(batches(result.bundle.tensors), None)
                        part = await message_of(batch, answer, self._waits, b"".join)
                except BudgetError:  # the trainer asks for the backward
                    continue
                credit.pushed(len(part))
                yield part

    @contextmanager
    def _requested(
        self, session: SessionState, request: segment_pb2.BackwardRequest
    ) -> Iterator[tuple[Segment, SegmentRequest]]:
        """Requests a backward, and keeps its result while the answer is sent. Yields the segment and the request.

        The gradients that came with the request are stored already.
        """
        segment = self.worker.segment(session, request.key.segment)
        addresses = {gradient.output: gradient.tensor for gradient in request.start.gradients}
        if segment.inputs is None or max(addresses, default=-1) >= len(segment.inputs.program.outputs):
            raise ProgramError(
                f"a gradient is given for output {max(addresses, default=0)}, past the last of {segment.name}"
            )
        inputs = BackwardInputs(
            tuple(sorted(addresses.items())),
            decode_state(request.start.ambient_state),
            request.start.wants_digests,
            tuple(request.start.summed_sources),
            _outputs(request.start.wanted_outputs, segment),
            request.start.wants_contribution_digests,
        )
        slots = {slot.source: slot.slot for slot in request.slots}
        if max(slots, default=-1) >= len(segment.inputs.sources):
            raise ProgramError(f"a slot is named for source {max(slots)} of {segment.name}")
        keep = GradientsToKeep(slots, request.pass_number) if slots else None

        def prepare() -> Operation:
            gradients = self.worker.gradients(session, addresses)
            return partial(executions.backward, start=inputs, gradients=gradients, chained=segment.chained)

        key = Key("backward", request.key.backward)
        with self.worker.answers.answering(segment, key):
            unsent = tuple(request.unsent_sources)
            submitted = self._engine.request(segment, key, prepare, request.expected_s, inputs, keep, unsent)
            self._engine.announced(session, request.upcoming_segments)
            yield segment, submitted

    async def _released(
        self, session: SessionState, number: int, request: segment_pb2.ReleaseRequest
    ) -> AsyncGenerator[segment_pb2.Answer | bytes]:
        """Commits kept gradients to their sums, then frees segments."""
        if request.HasField("commits"):
            self._commit(session, request.commits)
        self.worker.release(session, [key.segment for key in request.keys], request.number)
        yield segment_pb2.Answer(number=number, release=segment_pb2.ReleaseResult())

    async def _collected(
        self, session: SessionState, number: int, request: segment_pb2.Request
    ) -> AsyncGenerator[segment_pb2.Answer | bytes]:
        """Commits kept gradients, and yields progress, then the sums."""
        collect, head = request.collect_gradients, segment_pb2.Answer(number=number)
        with self.worker.answers.collecting(session):
            self._commit(session, collect.commits)
            answer = self._engine.sums(session).collect(collect.commits.round, collect.count)
            while not answer.done():
                self.session(session.id)
                yield segment_pb2.Answer(number=number, progress=segment_pb2.Progress())
                await asyncio.wait([answer], timeout=PROGRESS_INTERVAL_S)
            sums = result_of(answer)
            async for _ in self._until_computed(sums.values()):
                self.session(session.id)
                yield segment_pb2.Answer(number=number, progress=segment_pb2.Progress())
            result = segment_pb2.Answer(
                number=number, collect_gradients=segment_pb2.CollectGradientsResult(slots=sums), tensor_count=len(sums)
            )
            async for message in self._sent(session, request, head, result.SerializeToString(), list(sums.values())):
                yield message

    async def _fetched(
        self, session: SessionState, number: int, request: segment_pb2.Request
    ) -> AsyncGenerator[segment_pb2.Answer | bytes]:
        """Yields those of the requested tensors that segments of the session name."""
        head = segment_pb2.Answer(number=number)
        with self.worker.answers.reading(session, request.fetch_sources.addresses) as outgoing_tensors:
            result = segment_pb2.Answer(
                number=number, fetch_sources=segment_pb2.FetchSourcesResult(), tensor_count=len(outgoing_tensors)
            )
            async for message in self._sent(session, request, head, result.SerializeToString(), outgoing_tensors):
                yield message

    def _commit(self, session: SessionState, commits: segment_pb2.Commits) -> None:
        backwards = [(key.segment, key.backward) for key in commits.backwards]
        self._engine.sums(session).commit(commits.round, commits.first, backwards)

    def _shared_writer(self, session: SessionState, answer: int) -> SharedWriter:
        """Returns a function that writes tensors of an answer to memory that the trainer shares.

        It returns None for a tensor that must travel in the message instead.
        """
        if not answer or session.memory is None:
            return lambda _: None
        write = session.memory.answering(answer)

        def write_and_count(outgoing: OutgoingTensor) -> tensor_pb2.Location | None:
            location = write(outgoing)
            if location is not None:
                self.meter.sent(outgoing.layout.payload_bytes)
            return location

        return write_and_count

    async def _wait(
        self, segment: Segment, answer: "asyncio.Future[ExecutionResult]"
    ) -> AsyncIterator[segment_pb2.Progress]:
        """Yields the progress of a request until it is done. Renews the lease of its session meanwhile.

        The first message comes at once only if much other work is queued before it: most requests are answered sooner.
        """
        while not answer.done():
            running, queued_s = self._engine.progress(segment)
            if is_far := queued_s > PROGRESS_INTERVAL_S:
                yield segment_pb2.Progress(running=running, ahead_s=queued_s)
            await asyncio.wait([answer], timeout=PROGRESS_INTERVAL_S)
            self.session(segment.session.id)
            if not is_far and not answer.done():
                running, queued_s = self._engine.progress(segment)
                yield segment_pb2.Progress(running=running, ahead_s=queued_s)
        async for _ in self._until_computed(result_of(answer).bundle.tensors):
            self.session(segment.session.id)
            yield segment_pb2.Progress(running=True)

    async def _until_computed(self, outgoing_tensors: Iterable[OutgoingTensor]) -> AsyncIterator[None]:
        """Yields after each `PROGRESS_INTERVAL_S`, until the device has computed these tensors. Raises its errors."""
        moments = _made(outgoing_tensors)
        if all(moment.has_come for moment in moments):
            return
        computing = asyncio.ensure_future(self._waits.computed(moments))
        while not (await asyncio.wait([computing], timeout=PROGRESS_INTERVAL_S))[0]:
            yield
        computing.result()


def _outputs(wanted: Sequence[int], segment: Segment) -> tuple[int, ...]:
    """Returns the positions of the outputs whose contents are wanted. Raises ProgramError for others, or for many."""
    assert segment.inputs is not None
    if len(wanted) > MOST_OUTPUTS or max(wanted, default=-1) >= len(segment.inputs.program.outputs):
        raise ProgramError(f"{len(wanted)} outputs are wanted, up to output {max(wanted)} of {segment.name}")
    return tuple(wanted)


async def _encoded(result: ExecutionResult, answer: Callable[[], bytes]) -> bytes:
    """Returns the encoded answer for a result. A thread encodes a long one, which would block the loop."""
    return await asyncio.to_thread(answer) if result.parts > MANY_PARTS else answer()


def _made(outgoing_tensors: Iterable[OutgoingTensor]) -> list[DeviceMoment]:
    return [moment for outgoing in outgoing_tensors for moment in outgoing.made]


def _ready(queue: "asyncio.Queue[Segment | None]", credit: PushCredit) -> Iterator[Segment]:
    """Yields the segments that are in a queue now, while their results have room. Leaves the None that ends it."""
    with suppress(asyncio.QueueEmpty):
        while credit.has_room:
            segment = queue.get_nowait()
            if segment is None:
                queue.put_nowait(None)
                return
            yield segment
