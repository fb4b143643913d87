"""Segments by wire: saved, recomputed, run backward, released. All decisions are the core's."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from time import perf_counter, time
from typing import Any

from backhaul_proto.v1 import segment_pb2, tensor_pb2
from backhaul_runtime.errors import BackhaulError, BudgetError, ProgramError, TransferError
from backhaul_runtime.program.codec import decode_state, encode_state
from backhaul_runtime.sealing import sealed
from backhaul_runtime.wire.bundle import encode_view
from backhaul_runtime.wire.protocol import CHUNK_BYTES, PROGRESS_INTERVAL_S
from backhaul_runtime.wire.shared_memory import shared_bytes
from backhaul_runtime.wire.splicing import SPLICED_BYTES, TensorMessage, accepted, encode_all, field_of
from backhaul_runtime.wire.tensor_stream import PLACED_BYTES, OutgoingTensor, SharedWriter, batches
from backhaul_server.worker.engine import runs
from backhaul_server.worker.engine.gradient_sums import GradientsToKeep
from backhaul_server.worker.engine.runs import BackwardInputs, RunResult
from backhaul_server.worker.engine.segment import Operation, Segment, SegmentRequest, SessionState
from backhaul_server.worker.engine.segment_machine import Key
from backhaul_server.worker.rpc.calls import Context, Servicer, open_stream, stream, unary
from backhaul_server.worker.rpc.tensor_service import TensorUpload

MANY_PARTS = 2_048
"""Of an answer: one with more digests, views and gradients is not written in the event loop, nor sent ahead."""


class SegmentServicer(Servicer):
    """Saves, recomputes, runs backward, releases."""

    @unary
    async def SaveSegment(  # noqa: N802  gRPC's name
        self, carried: TensorMessage[segment_pb2.SaveSegmentRequest], context: Context
    ) -> segment_pb2.SaveSegmentResponse:
        """Answers what is missing, or saves."""
        return self._save(carried, self._take_in(carried))

    @open_stream
    async def ShortSaves(  # noqa: N802  gRPC's name
        self, requests: AsyncIterator[TensorMessage[segment_pb2.SaveSegmentRequest] | BackhaulError], context: Context
    ) -> AsyncIterator[segment_pb2.SaveSegmentResponse]:
        """Answers each as SaveSegment does, but leaves it to that to say what is wrong."""
        with ExitStack() as opened:
            async for received in self._each(requests, opened):
                started, stored = perf_counter(), list[bytes]()
                try:
                    carried = accepted(received)
                    stored = self._take_in(carried)
                    answer = self._save(carried, stored)
                except BackhaulError as error:
                    self.failed(received, error)
                    answer = segment_pb2.SaveSegmentResponse(refused=True)
                answer.stored[:] = stored
                yield answer
                if not answer.refused:
                    self.meter.call("SaveSegment", perf_counter() - started, failed=False)

    async def _each(
        self, requests: AsyncIterator[TensorMessage[Any] | BackhaulError], opened: ExitStack
    ) -> AsyncIterator[TensorMessage[Any] | BackhaulError]:
        """The requests of a stream, which counts among the streams of the first session that one of them names."""
        with ExitStack() as opening:
            opening.enter_context(self.worker.opening())
            is_counted, coming = False, aiter(requests)
            named_until_s = asyncio.get_running_loop().time() + self.worker.lease_s
            while True:
                try:
                    async with asyncio.timeout_at(None if is_counted else named_until_s):
                        received = await anext(coming)
                except StopAsyncIteration:
                    return
                except TimeoutError:
                    raise TransferError(f"a stream named no session for {self.worker.lease_s:g} s") from None
                if not is_counted and isinstance(received, TensorMessage):
                    session = self.worker.sessions.get(received.message.key.session)
                    if session is not None:
                        opening.close()
                        opened.enter_context(self.worker.streaming(session))
                        is_counted = True
                yield received

    def _take_in(
        self, carried: "TensorMessage[segment_pb2.SaveSegmentRequest] | TensorMessage[segment_pb2.BackwardRequest]"
    ) -> list[bytes]:
        """Stores what came with a request, all or nothing. Returns the addresses."""
        with TensorUpload(self.worker) as arriving:
            arriving.come_from(self.worker.session(carried.message.key.session))
            arriving.add(carried)
            self.meter.received(shared_bytes(carried.tensors))
            return arriving.stored()

    def _save(
        self, carried: TensorMessage[segment_pb2.SaveSegmentRequest], stored: Sequence[bytes]
    ) -> segment_pb2.SaveSegmentResponse:
        request = carried.message
        declarations = carried.tensors.declarations if carried.tensors is not None else ()
        unnamed = (found for found, declared in zip(stored, declarations, strict=True) if not declared.address)
        sources = [address or next(unnamed, b"") for address in request.sources]
        session = self.worker.session(request.key.session)
        self.worker.store.give_up(session.id, request.superseded)
        program_missing, missing = self.worker.save(
            session,
            request.key.segment,
            request.program,
            sources,
            request.transient_sources,
            request.generator_states,
            request.name,
            request.wants_sketches,
            {each.source: (each.segment, each.output) for each in request.predecessors},
            is_predicted=request.predicted,
        )
        return segment_pb2.SaveSegmentResponse(program_missing=program_missing, missing_tensors=missing)

    @stream
    async def Recompute(  # noqa: N802  gRPC's name
        self, request: segment_pb2.RecomputeRequest, context: Context
    ) -> AsyncIterator[segment_pb2.RecomputeResponse | bytes]:
        """Streams progress, then what was saved, in the order asked for."""
        session = self.worker.session(request.key.session)
        segment = self.worker.segment(session, request.key.segment)
        key = Key("recompute", request.key.backward)
        positions = tuple(request.positions)
        if len(set(positions)) < len(positions):
            raise ProgramError(f"a saved tensor of {segment.name} is asked for twice in one request")
        perform = partial(runs.recompute, positions=positions)
        with self.worker.segments.answering(segment, key):
            asked = self.worker.segments.request(segment, key, lambda: perform, request.expected_s)
            self.worker.replay_ahead(session, request.upcoming_segments)
            async for progress in self._wait(segment, asked.answer):
                yield segment_pb2.RecomputeResponse(progress=progress)
            found = asked.answer.result()
            place = self._placing(session, request.answer)
            with self.worker.segments.sending(found.bundle.size_bytes):
                for message in await self._made(found, lambda: _recompute_answer(segment, asked, place)):
                    yield message

    @stream
    async def Backward(  # noqa: N802  gRPC's name
        self, carried: TensorMessage[segment_pb2.BackwardRequest], context: Context
    ) -> AsyncIterator[segment_pb2.BackwardResponse | bytes]:
        """Streams progress, then digests and contributions."""
        with self._backward(carried) as (segment, asked):
            async for progress in self._wait(segment, asked.answer):
                yield segment_pb2.BackwardResponse(progress=progress)
            found = asked.answer.result()
            place = self._placing(segment.session, carried.message.answer)
            with self.worker.segments.sending(found.bundle.size_bytes):
                for message in await self._made(found, lambda: _backward_answer(segment, asked, place)):
                    yield message

    @open_stream
    async def ShortBackwards(  # noqa: N802  gRPC's name
        self, requests: AsyncIterator[TensorMessage[segment_pb2.BackwardRequest] | BackhaulError], context: Context
    ) -> AsyncIterator[segment_pb2.BackwardResponse | bytes]:
        """Answers what it can with one message, soon. All else, errors too, is left to `Backward`."""
        with ExitStack() as opened:
            async for received in self._each(requests, opened):
                started, answer = perf_counter(), None
                with suppress(Exception):  # a bug of ours too: `Backward` meets it again, and logs it
                    carried = accepted(received)
                    answer = await self._short_answer(carried)
                with self.worker.segments.sending(len(answer or b"")):
                    yield segment_pb2.BackwardResponse() if answer is None else answer
                if answer is not None:
                    self.meter.call("Backward", perf_counter() - started, failed=False)

    async def _short_answer(self, carried: TensorMessage[segment_pb2.BackwardRequest]) -> bytes | None:
        with self._backward(carried) as (segment, asked):
            await asyncio.wait([asked.answer], timeout=PROGRESS_INTERVAL_S)
            most = PLACED_BYTES if carried.message.answer else CHUNK_BYTES
            if not asked.answer.done() or asked.answer.result().bundle.size_bytes > most:
                return None
            if asked.answer.result().parts > MANY_PARTS:
                return None
            place = self._placing(segment.session, carried.message.answer)
            first, *more = itertools.islice(_backward_answer(segment, asked, place), 2)
            return None if more else first

    @open_stream
    async def Ahead(  # noqa: N802  gRPC's name
        self, request: segment_pb2.AheadRequest, context: Context
    ) -> AsyncIterator[bytes]:
        """Sends what is ready before it is asked for, for as long as the session lasts or until another call does."""
        session = self.worker.sessions.get(request.session)
        if session is None:
            return
        with self.worker.streaming(session):
            queue = session.start_telling()
            try:
                while (segment := await queue.get()) is not None:
                    segments = itertools.chain((segment,), _waiting(queue))
                    for message in _together(filter(None, map(self._told, segments))):
                        with suppress(BudgetError), self.worker.segments.sending(len(message)):
                            yield message  # or not: who misses it asks
            finally:
                if session.telling is queue:
                    session.stop_telling()

    async def _made(self, found: RunResult, make: Callable[[], Iterator[bytes]]) -> Iterator[bytes]:
        """The messages of an answer. What a long one says is written beside the event loop, by another thread."""
        messages = make()
        if found.parts <= MANY_PARTS:
            return messages
        first = await asyncio.to_thread(next, messages)
        return itertools.chain((first,), messages)

    def _told(self, segment: Segment) -> bytes | None:
        """The guess about a segment as it is told, None where there is none or a larger one."""
        found = self.worker.segments.told(segment, CHUNK_BYTES, MANY_PARTS)
        return None if found is None else _ahead_answer(segment, *found)

    @contextmanager
    def _backward(
        self, carried: TensorMessage[segment_pb2.BackwardRequest]
    ) -> Iterator[tuple[Segment, SegmentRequest]]:
        """Around a backward that was asked for, and its answer."""
        request = carried.message
        session = self.worker.session(request.key.session)
        segment = self.worker.segment(session, request.key.segment)
        addresses = {gradient.output: gradient.tensor for gradient in request.start.gradients}
        if segment.work is None or max(addresses, default=-1) >= len(segment.work.program.outputs):
            raise ProgramError(
                f"a gradient is given for output {max(addresses, default=0)}, past the last of {segment.name}"
            )
        self._take_in(carried)
        start = BackwardInputs(
            tuple(sorted(addresses.items())),
            decode_state(request.start.ambient_state),
            request.start.wants_digests,
            tuple(request.start.summed_sources),
        )
        slots = {each.source: each.slot for each in request.slots}
        if max(slots, default=-1) >= len(segment.work.sources):
            raise ProgramError(f"a slot is named for source {max(slots)} of {segment.name}")
        keep = GradientsToKeep(slots, request.pass_number) if slots else None

        def prepare() -> Operation:
            gradients = self.worker.gradients(session, addresses)
            return partial(runs.backward, start=start, gradients=gradients, chained=segment.predecessors)

        key = Key("backward", request.key.backward)
        with self.worker.segments.answering(segment, key):
            asked = self.worker.segments.request(segment, key, prepare, request.expected_s, start, keep)
            self.worker.replay_ahead(session, request.upcoming_segments)
            yield segment, asked

    @unary
    async def ReleaseSegments(  # noqa: N802  gRPC's name
        self, request: segment_pb2.ReleaseSegmentsRequest, context: Context
    ) -> segment_pb2.ReleaseSegmentsResponse:
        """Counts what was kept, then frees segments."""
        if request.commits.backwards:
            self._commit(self.worker.session(request.commits.backwards[0].session), request.commits)
        for key in request.keys:
            self.worker.release(self.worker.session(key.session), [key.segment])
        return segment_pb2.ReleaseSegmentsResponse()

    @stream
    async def CollectGradients(  # noqa: N802  gRPC's name
        self, request: segment_pb2.CollectGradientsRequest, context: Context
    ) -> AsyncIterator[segment_pb2.CollectGradientsResponse | bytes]:
        """Streams progress, then the sums."""
        session = self.worker.session(request.session)
        with self.worker.segments.collecting(session):
            self._commit(session, request.commits)
            answer = self.worker.segments.sums(session).collect(request.commits.round, request.count)
            while not answer.done():
                self.worker.session(session.id)
                yield segment_pb2.CollectGradientsResponse(progress=segment_pb2.Progress())
                await asyncio.wait([answer], timeout=PROGRESS_INTERVAL_S)
            found = answer.result()
            result = segment_pb2.CollectGradientsResult(slots=found)
            response = segment_pb2.CollectGradientsResponse(result=result)
            parcels = batches(found.values(), self._placing(session, request.answer))
            with self.worker.segments.sending(sum(parcel.layout.span_bytes for parcel in found.values())):
                for message in encode_all(parcels, response.TENSORS_FIELD_NUMBER, response):
                    yield message

    @stream
    async def FetchSources(  # noqa: N802  gRPC's name
        self, request: segment_pb2.FetchSourcesRequest, context: Context
    ) -> AsyncIterator[segment_pb2.FetchSourcesResponse | bytes]:
        """Sends what is asked for, as far as segments of the session name it."""
        session = self.worker.session(request.session)
        response = segment_pb2.FetchSourcesResponse(result=segment_pb2.FetchSourcesResult())
        with self.worker.segments.reading(session, request.addresses) as parcels:
            placed = batches(parcels, self._placing(session, request.answer))
            with self.worker.segments.sending(sum(parcel.layout.span_bytes for parcel in parcels)):
                for message in encode_all(placed, response.TENSORS_FIELD_NUMBER, response):
                    yield message

    def _commit(self, session: SessionState, commits: segment_pb2.Commits) -> None:
        backwards = [(key.segment, key.backward) for key in commits.backwards]
        self.worker.segments.sums(session).commit(commits.round, commits.first, backwards)

    def _placing(self, session: SessionState, answer: int) -> SharedWriter:
        """Puts tensors of an answer into memory that its trainer shares; without any they go as chunks."""
        if not answer or session.memory is None:
            return lambda _: None
        put = session.memory.answering(answer)

        def place(parcel: OutgoingTensor) -> tensor_pb2.Location | None:
            placed = put(parcel)
            if placed is not None:
                self.meter.sent(parcel.layout.payload_bytes)
            return placed

        return place

    async def _wait(self, segment: Segment, answer: "asyncio.Future[RunResult]") -> AsyncIterator[segment_pb2.Progress]:
        """Says how far a request is until it is done. Keeps its session alive meanwhile."""
        while not answer.done():
            running, queued_s = self.worker.segments.executor.place(segment.job)
            self.worker.session(segment.session.id)
            yield segment_pb2.Progress(running=running, ahead_s=queued_s)
            await asyncio.wait([answer], timeout=PROGRESS_INTERVAL_S)


def _recompute_answer(segment: Segment, asked: SegmentRequest, place: SharedWriter) -> Iterator[bytes]:
    found = asked.answer.result()
    result = segment_pb2.RecomputeResult(
        saved_digests=found.saved_digests,
        views=[encode_view(view) for view in found.bundle.views],
        saved_sketches=_sketches(found),
        timing=_timing(segment, asked.came_at_s, found),
    )
    response = segment_pb2.RecomputeResponse(result=result)
    yield from encode_all(batches(found.bundle.parcels, place), response.TENSORS_FIELD_NUMBER, response)


def _backward_answer(segment: Segment, asked: SegmentRequest, place: SharedWriter = lambda _: None) -> Iterator[bytes]:
    found = asked.answer.result()
    response = segment_pb2.BackwardResponse(result=_backward_result(segment, found, asked.came_at_s))
    yield from encode_all(batches(found.bundle.parcels, place), response.TENSORS_FIELD_NUMBER, response)


def _ahead_answer(segment: Segment, start: BackwardInputs, found: RunResult) -> bytes:
    """Not sealed: several go in one message."""
    result = _backward_result(segment, found, time())
    response = segment_pb2.AheadResponse(segment=segment.id, start=_encoded(start), result=result)
    (part,) = encode_all(batches(found.bundle.parcels), response.TENSORS_FIELD_NUMBER, response, b"".join)
    return part


def _waiting(queue: "asyncio.Queue[Segment | None]") -> Iterator[Segment]:
    """What is in a queue already."""
    with suppress(asyncio.QueueEmpty):
        while (segment := queue.get_nowait()) is not None:
            yield segment
        queue.put_nowait(None)


def _together(answers: Iterable[bytes]) -> Iterator[bytes]:
    """Short ones, not sealed yet, as one message: it takes longer to send than what it holds.

    Reads no further than it has written.
    """
    number, held = segment_pb2.AheadResponse.MORE_FIELD_NUMBER, list[bytes]()
    for answer in answers:
        held.append(field_of(number, answer) if held else answer)
        if sum(map(len, held)) >= SPLICED_BYTES:
            yield sealed(held)
            held = []
    if held:
        yield sealed(held)


def encode_contributions(found: RunResult) -> list[segment_pb2.Contribution]:
    """The contributions of a backward as they stand in its answer, in order."""
    contributions = [
        segment_pb2.Contribution(source=source, kept=position in found.kept)
        for position, source in enumerate(found.sources)
    ]
    for view in found.bundle.views:
        contributions[view.position].view.CopyFrom(encode_view(view))
    return contributions


def _backward_result(segment: Segment, found: RunResult, asked_at_s: float) -> segment_pb2.BackwardResult:
    return segment_pb2.BackwardResult(
        saved_digests=found.saved_digests,
        contributions=encode_contributions(found),
        tensor_digests=found.tensor_digests,
        saved_sketches=_sketches(found),
        timing=_timing(segment, asked_at_s, found),
        chained_gradients=[
            segment_pb2.SourceGradient(source=source, tensor=parcel.address) for source, parcel in found.chained.items()
        ],
        goes_on=segment.goes_on(),
    )


def _encoded(start: BackwardInputs) -> segment_pb2.Start:
    return segment_pb2.Start(
        gradients=[segment_pb2.OutputGradient(output=output, tensor=tensor) for output, tensor in start.addresses],
        ambient_state=encode_state(start.state),
        wants_digests=start.wants_digests,
        summed_sources=start.summed,
    )


def _sketches(found: RunResult) -> list[segment_pb2.Sketch]:
    return [segment_pb2.Sketch(numbers=numbers) for numbers in found.saved_sketches]


def _timing(segment: Segment, asked_at_s: float, found: RunResult) -> segment_pb2.Timing:
    was_ahead = found.recompute_at_s < asked_at_s
    return segment_pb2.Timing(
        queued_at_s=segment.queued_at_s if was_ahead else asked_at_s,
        recompute_at_s=found.recompute_at_s,
        recompute_s=found.recompute_s,
        requested_at_s=asked_at_s,
        backward_at_s=found.backward_at_s,
        backward_s=found.backward_s,
    )
