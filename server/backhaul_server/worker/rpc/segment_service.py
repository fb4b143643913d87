"""The RPCs for segments: save, recompute, run backward, release, and collect gradient sums.

The servicer translates between protobuf and the engine. `Worker` decides about sessions and saved segments,
`SegmentEngine` about requests and their answers.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from time import perf_counter
from typing import Any

from backhaul_proto.v1 import segment_pb2, tensor_pb2
from backhaul_runtime.errors import BackhaulError, BudgetError, ProgramError, TransferError
from backhaul_runtime.program.codec import decode_state
from backhaul_runtime.tensors.staging import DeviceMoment
from backhaul_runtime.wire.layout_codec import decode_layout
from backhaul_runtime.wire.protocol import CHUNK_BYTES, PROGRESS_INTERVAL_S
from backhaul_runtime.wire.shared_memory import shared_bytes
from backhaul_runtime.wire.splicing import TensorMessage, accepted
from backhaul_runtime.wire.tensor_batches import PLACED_BYTES, OutgoingTensor, SharedWriter, batches
from backhaul_server.worker.audit import AuditLog
from backhaul_server.worker.engine import segment_runs
from backhaul_server.worker.engine.gradient_sums import GradientsToKeep
from backhaul_server.worker.engine.segment import Operation, Segment, SegmentRequest, SessionState, result_of
from backhaul_server.worker.engine.segment_engine import SegmentEngine
from backhaul_server.worker.engine.segment_machine import Key
from backhaul_server.worker.engine.segment_runs import BackwardInputs, RunResult
from backhaul_server.worker.engine.worker import Worker
from backhaul_server.worker.rpc.calls import Context, Servicer, open_stream, stream, unary
from backhaul_server.worker.rpc.meter import RpcMeter
from backhaul_server.worker.rpc.segment_answers import (
    backward_answer,
    joined,
    message_of,
    messages_of,
    pushed_answer,
    recompute_answer,
)
from backhaul_server.worker.rpc.uploads import TensorUpload

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

    @unary
    async def SaveSegment(  # noqa: N802  gRPC's name
        self, carried: TensorMessage[segment_pb2.SaveSegmentRequest], context: Context
    ) -> segment_pb2.SaveSegmentResponse:
        """Saves a segment, or answers which tensors and whether the program are missing."""
        return self._save(carried, await self._store_tensors(carried))

    @open_stream
    async def ShortSaves(  # noqa: N802  gRPC's name
        self, requests: AsyncIterator[TensorMessage[segment_pb2.SaveSegmentRequest] | BackhaulError], context: Context
    ) -> AsyncIterator[segment_pb2.SaveSegmentResponse]:
        """Answers each request as SaveSegment does. For a refused request the trainer learns why from SaveSegment."""
        with ExitStack() as opened:
            async for received in self._counted(requests, opened):
                started, stored = perf_counter(), list[bytes]()
                try:
                    carried = accepted(received)
                    stored = await self._store_tensors(carried)
                    answer = self._save(carried, stored)
                except BackhaulError as error:
                    self.failed(received, error, context)
                    answer = segment_pb2.SaveSegmentResponse(refused=True)
                answer.stored[:] = stored
                yield answer
                if not answer.refused:
                    self.meter.call("SaveSegment", perf_counter() - started, failed=False)

    async def _counted(
        self, requests: AsyncIterator[TensorMessage[Any] | BackhaulError], opened: ExitStack
    ) -> AsyncIterator[TensorMessage[Any] | BackhaulError]:
        """Yields a stream's requests. The first session that one of them names is charged with the stream.

        Raises:
            TransferError: No request has named a session within the time of a lease.
        """
        with ExitStack() as opening:
            opening.enter_context(self.worker.opening())
            is_counted, incoming = False, aiter(requests)
            named_until_s = asyncio.get_running_loop().time() + self.worker.lease_s
            while True:
                try:
                    async with asyncio.timeout_at(None if is_counted else named_until_s):
                        received = await anext(incoming)
                except StopAsyncIteration:
                    return
                except TimeoutError:
                    raise TransferError(f"a stream named no session for {self.worker.lease_s:g} s") from None
                if not is_counted and isinstance(received, TensorMessage):
                    session_id = received.message.key.session
                    if session_id in self.worker.sessions:
                        opening.close()
                        opened.enter_context(self.worker.streaming(self.session(session_id)))
                        is_counted = True
                yield received

    async def _store_tensors(
        self, carried: "TensorMessage[segment_pb2.SaveSegmentRequest] | TensorMessage[segment_pb2.BackwardRequest]"
    ) -> list[bytes]:
        """Stores all tensors of a request, or none if one is invalid. Returns their addresses."""
        with TensorUpload(self.worker) as upload:
            upload.set_session(self.session(carried.message.key.session))
            await upload.add(carried)
            self.meter.received(shared_bytes(carried.tensors))
            return await upload.stored()

    def _save(
        self, carried: TensorMessage[segment_pb2.SaveSegmentRequest], stored: Sequence[bytes]
    ) -> segment_pb2.SaveSegmentResponse:
        request = carried.message
        declarations = carried.tensors.declarations if carried.tensors is not None else ()
        # A source without an address is the next tensor of the message whose declaration has none either.
        unnamed = (address for address, declared in zip(stored, declarations, strict=True) if not declared.address)
        sources = [address or next(unnamed, b"") for address in request.sources]
        session = self.session(request.key.session)
        self.worker.disown(session, request.superseded)
        program_missing, missing = self.worker.save(
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
            is_predicted=request.predicted,
            after_release=request.after_release,
        )
        return segment_pb2.SaveSegmentResponse(program_missing=program_missing, missing_tensors=missing)

    @stream
    async def Recompute(  # noqa: N802  gRPC's name
        self, request: segment_pb2.RecomputeRequest, context: Context
    ) -> AsyncIterator[segment_pb2.RecomputeResponse | bytes]:
        """Streams progress, then the requested saved tensors in the order of the request."""
        session = self.session(request.key.session)
        segment = self.worker.segment(session, request.key.segment)
        key = Key("recompute", request.key.backward)
        positions = tuple(request.positions)
        if len(set(positions)) < len(positions):
            raise ProgramError(f"a saved tensor of {segment.name} is requested twice in one request")
        perform = partial(segment_runs.recompute, positions=positions)
        with self._engine.answering(segment, key):
            submitted = self._engine.request(segment, key, lambda: perform, request.expected_s)
            self.worker.replay_ahead(session, request.upcoming_segments)
            async for progress in self._wait(segment, submitted.answer):
                yield segment_pb2.RecomputeResponse(progress=progress)
            result = result_of(submitted.answer)
            placed = batches(result.bundle.tensors, self._shared_writer(session, request.answer))
            with self._engine.sending(session, result.bundle.size_bytes):
                answer = await _encoded(result, partial(recompute_answer, segment, submitted))
                number = segment_pb2.RecomputeResponse.TENSORS_FIELD_NUMBER
                async for message in messages_of(placed, number, answer, self._waits):
                    yield message

    @stream
    async def Backward(  # noqa: N802  gRPC's name
        self, carried: TensorMessage[segment_pb2.BackwardRequest], context: Context
    ) -> AsyncIterator[segment_pb2.BackwardResponse | bytes]:
        """Streams progress, then digests and contributions."""
        await self._store_tensors(carried)
        with self._backward(carried.message) as (segment, submitted):
            async for progress in self._wait(segment, submitted.answer):
                yield segment_pb2.BackwardResponse(progress=progress)
            result = result_of(submitted.answer)
            placed = batches(result.bundle.tensors, self._shared_writer(segment.session, carried.message.answer))
            with self._engine.sending(segment.session, result.bundle.size_bytes):
                answer = await _encoded(result, partial(backward_answer, segment, submitted))
                number = segment_pb2.BackwardResponse.TENSORS_FIELD_NUMBER
                async for message in messages_of(placed, number, answer, self._waits):
                    yield message

    @open_stream
    async def ShortBackwards(  # noqa: N802  gRPC's name
        self, requests: AsyncIterator[TensorMessage[segment_pb2.BackwardRequest] | BackhaulError], context: Context
    ) -> AsyncIterator[segment_pb2.BackwardResponse | bytes]:
        """Answers requests whose result is ready soon and fits one message. For others the trainer calls Backward."""
        with ExitStack() as opened:
            async for received in self._counted(requests, opened):
                started, answer = perf_counter(), None
                with suppress(Exception):  # the trainer repeats the request with `Backward`, which reports the error
                    carried = accepted(received)
                    answer = await self._short_answer(carried)
                if answer is None:
                    yield segment_pb2.BackwardResponse()
                    continue
                with self._engine.sending(self.session(carried.message.key.session), len(answer)):
                    yield answer
                self.meter.call("Backward", perf_counter() - started, failed=False)

    async def _short_answer(self, carried: TensorMessage[segment_pb2.BackwardRequest]) -> bytes | None:
        await self._store_tensors(carried)
        with self._backward(carried.message) as (segment, submitted):
            await asyncio.wait([submitted.answer], timeout=PROGRESS_INTERVAL_S)
            most_bytes = PLACED_BYTES if carried.message.answer else CHUNK_BYTES
            if not submitted.answer.done():
                return None
            result = result_of(submitted.answer)
            if result.bundle.size_bytes > most_bytes or result.parts > MANY_PARTS:
                return None
            async for _ in self._until_computed(result.bundle.tensors):
                return None
            outgoing = batches(result.bundle.tensors, self._shared_writer(segment.session, carried.message.answer))
            first, more = next(outgoing, None), next(outgoing, None)
            if more is not None:
                return None
            number = segment_pb2.BackwardResponse.TENSORS_FIELD_NUMBER
            return await message_of(first, number, backward_answer(segment, submitted), self._waits)

    @open_stream
    async def Ahead(  # noqa: N802  gRPC's name
        self, request: segment_pb2.AheadRequest, context: Context
    ) -> AsyncIterator[bytes]:
        """Pushes results of speculative backwards until the session ends, or another call of this RPC takes over."""
        if request.session not in self.worker.sessions:
            return
        session = self.session(request.session)
        with self.worker.streaming(session):
            queue = session.open_push_queue()
            try:
                while (segment := await queue.get()) is not None:
                    async for message in joined(self._pushed(itertools.chain((segment,), _waiting(queue)))):
                        # Without memory to send it, the message is dropped: the trainer then calls Backward.
                        with suppress(BudgetError), self._engine.sending(session, len(message)):
                            yield message
            finally:
                if session.push_queue is queue:
                    session.close_push_queue()

    async def _pushed(self, segments: Iterable[Segment]) -> AsyncIterator[bytes]:
        """Yields the speculative backwards of segments, except those that are gone or too large to push.

        They are not sealed yet, because several of them share one message.
        """
        for segment in segments:
            backward = self._engine.take_pushed(segment, CHUNK_BYTES, MANY_PARTS)
            if backward is not None:
                inputs, result = backward
                number, answer = segment_pb2.AheadResponse.TENSORS_FIELD_NUMBER, pushed_answer(segment, inputs, result)
                try:  # while a thread waits, the store may drop the result: what is sent is charged, too
                    with self._engine.sending(segment.session, result.bundle.size_bytes):
                        await self._waits.computed(_made(result.bundle.tensors))
                        batch = next(batches(result.bundle.tensors), None)
                        part = await message_of(batch, number, answer, self._waits, b"".join)
                except BudgetError:  # the trainer calls Backward
                    continue
                yield part

    @contextmanager
    def _backward(self, request: segment_pb2.BackwardRequest) -> Iterator[tuple[Segment, SegmentRequest]]:
        """Requests a backward, and keeps its result while the answer is sent. Yields the segment and the request.

        The gradients that came with the request are stored already.
        """
        session = self.session(request.key.session)
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
        )
        slots = {slot.source: slot.slot for slot in request.slots}
        if max(slots, default=-1) >= len(segment.inputs.sources):
            raise ProgramError(f"a slot is named for source {max(slots)} of {segment.name}")
        keep = GradientsToKeep(slots, request.pass_number) if slots else None

        def prepare() -> Operation:
            gradients = self.worker.gradients(session, addresses)
            return partial(segment_runs.backward, start=inputs, gradients=gradients, chained=segment.chained)

        key = Key("backward", request.key.backward)
        with self._engine.answering(segment, key):
            unsent = tuple(request.unsent_sources)
            submitted = self._engine.request(segment, key, prepare, request.expected_s, inputs, keep, unsent)
            self.worker.replay_ahead(session, request.upcoming_segments)
            yield segment, submitted

    @unary
    async def ReleaseSegments(  # noqa: N802  gRPC's name
        self, request: segment_pb2.ReleaseSegmentsRequest, context: Context
    ) -> segment_pb2.ReleaseSegmentsResponse:
        """Commits kept gradients to their sums, then frees segments."""
        if request.commits.backwards:
            self._commit(self.session(request.commits.backwards[0].session), request.commits)
        for key in request.keys:
            self.worker.release(self.session(key.session), [key.segment], request.number)
        return segment_pb2.ReleaseSegmentsResponse()

    @stream
    async def CollectGradients(  # noqa: N802  gRPC's name
        self, request: segment_pb2.CollectGradientsRequest, context: Context
    ) -> AsyncIterator[segment_pb2.CollectGradientsResponse | bytes]:
        """Commits kept gradients, and streams progress, then the sums."""
        session = self.session(request.session)
        with self._engine.collecting(session):
            self._commit(session, request.commits)
            answer = self._engine.sums(session).collect(request.commits.round, request.count)
            while not answer.done():
                self.session(session.id)
                yield segment_pb2.CollectGradientsResponse(progress=segment_pb2.Progress())
                await asyncio.wait([answer], timeout=PROGRESS_INTERVAL_S)
            sums = result_of(answer)
            async for _ in self._until_computed(sums.values()):
                self.session(session.id)
                yield segment_pb2.CollectGradientsResponse(progress=segment_pb2.Progress())
            response = segment_pb2.CollectGradientsResponse(result=segment_pb2.CollectGradientsResult(slots=sums))
            placed = batches(sums.values(), self._shared_writer(session, request.answer))
            with self._engine.sending(session, sum(outgoing.layout.span_bytes for outgoing in sums.values())):
                encoded, number = response.SerializeToString(), response.TENSORS_FIELD_NUMBER
                async for message in messages_of(placed, number, encoded, self._waits):
                    yield message

    @stream
    async def FetchSources(  # noqa: N802  gRPC's name
        self, request: segment_pb2.FetchSourcesRequest, context: Context
    ) -> AsyncIterator[segment_pb2.FetchSourcesResponse | bytes]:
        """Sends those of the requested tensors that segments of the session name."""
        session = self.session(request.session)
        response = segment_pb2.FetchSourcesResponse(result=segment_pb2.FetchSourcesResult())
        with self._engine.reading(session, request.addresses) as outgoing_tensors:
            placed = batches(outgoing_tensors, self._shared_writer(session, request.answer))
            with self._engine.sending(session, sum(outgoing.layout.span_bytes for outgoing in outgoing_tensors)):
                answer = response.SerializeToString()
                async for message in messages_of(placed, response.TENSORS_FIELD_NUMBER, answer, self._waits):
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

    async def _wait(self, segment: Segment, answer: "asyncio.Future[RunResult]") -> AsyncIterator[segment_pb2.Progress]:
        """Yields the progress of a request until it is done. Renews the lease of its session meanwhile."""
        while not answer.done():
            running, queued_s = self._engine.progress(segment)
            self.session(segment.session.id)
            yield segment_pb2.Progress(running=running, ahead_s=queued_s)
            await asyncio.wait([answer], timeout=PROGRESS_INTERVAL_S)
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


async def _encoded(result: RunResult, answer: Callable[[], bytes]) -> bytes:
    """Returns the encoded answer for a result. A thread encodes a long one, which would block the loop."""
    return await asyncio.to_thread(answer) if result.parts > MANY_PARTS else answer()


def _made(outgoing_tensors: Iterable[OutgoingTensor]) -> list[DeviceMoment]:
    return [moment for outgoing in outgoing_tensors for moment in outgoing.made]


def _waiting(queue: "asyncio.Queue[Segment | None]") -> Iterator[Segment]:
    """Yields the segments that are in a queue now. Leaves the None that ends it."""
    with suppress(asyncio.QueueEmpty):
        while (segment := queue.get_nowait()) is not None:
            yield segment
        queue.put_nowait(None)
