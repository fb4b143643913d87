"""The worker's wire: protobuf in, protobuf out, errors as statuses. All decisions are the core's."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, wraps
from time import monotonic, perf_counter, time
from typing import Any, Self, TypeVar

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from torch import Tensor

from backhaul_proto.v1 import (
    program_pb2,
    segment_pb2,
    session_pb2,
    telemetry_pb2,
    tensor_pb2,
)
from backhaul_runtime.bundle import encode_view
from backhaul_runtime.errors import (
    ERROR_METADATA_KEY,
    MAX_MESSAGE,
    STATUS_NAMES,
    BackhaulError,
    ProgramError,
    ProtocolVersionError,
    TransferError,
    WorkerError,
)
from backhaul_runtime.fingerprint import fingerprint
from backhaul_runtime.framing import Parcel, Receiver, batches
from backhaul_runtime.layout import Layout
from backhaul_runtime.logs import about
from backhaul_runtime.processes import resident_bytes
from backhaul_runtime.program_codec import decode_state
from backhaul_runtime.protocol import CHUNK_BYTES, PROGRESS_INTERVAL_S, PROTOCOL_VERSION
from backhaul_runtime.shared_memory import shared_bytes
from backhaul_runtime.splicing import Carried, deserializer, encode_all, serialize
from backhaul_runtime.version import version
from backhaul_server.worker import runs
from backhaul_server.worker.core import Worker
from backhaul_server.worker.handover import Sharing
from backhaul_server.worker.meter import Meter
from backhaul_server.worker.reports import Reports
from backhaul_server.worker.runs import Finished, Start
from backhaul_server.worker.segment_machine import Key
from backhaul_server.worker.segments import Perform, Request, Segment, Session
from backhaul_server.worker.sums import Keep

logger = logging.getLogger("backhaul.worker")

Context = grpc.aio.ServicerContext[Any, Any]
M = TypeVar("M", bound=Message)
Placing = Callable[[Parcel], tensor_pb2.Location | None]
Unary = Callable[[Any, Any, Context], Awaitable[M]]
Stream = Callable[[Any, Any, Context], AsyncIterator[M | bytes]]


async def _abort(context: Context, error: Exception) -> None:
    """Ends a call with an error of ours as its status, with what the client needs to raise it again."""
    if not isinstance(error, BackhaulError):
        error = WorkerError(f"the worker failed: {type(error).__name__}: {error}")
    status = next((STATUS_NAMES[kind] for kind in type(error).__mro__ if kind in STATUS_NAMES), "INTERNAL")
    context.set_trailing_metadata(((ERROR_METADATA_KEY, error.to_bytes()),))
    await context.abort(grpc.StatusCode[status], error.message[:MAX_MESSAGE])


def unary(method: Unary[M]) -> Unary[M]:
    """Measures a method that answers once, and maps its errors."""

    @wraps(method)
    async def call(self: "_Servicer", request: Any, context: Context) -> M:
        started, failed = perf_counter(), False
        try:
            return await method(self, request, context)
        except Exception as error:  # every error of ours has a status
            failed = True
            self.failed(request, error)
            await _abort(context, error)
            raise
        finally:
            self.meter.call(method.__name__, perf_counter() - started, failed=failed)

    return call


def stream(method: Stream[M]) -> Stream[M]:
    """Measures a method that answers many times, and maps its errors."""

    @wraps(method)
    async def call(self: "_Servicer", request: Any, context: Context) -> AsyncIterator[M | bytes]:
        started, failed = perf_counter(), False  # a client that has enough and leaves is no failure
        try:
            async for answer in method(self, request, context):
                yield answer
        except Exception as error:  # every error of ours has a status
            failed = True
            self.failed(request, error)
            await _abort(context, error)
        finally:
            self.meter.call(method.__name__, perf_counter() - started, failed=failed)

    return call


class _Servicer:
    def __init__(self, worker: Worker, meter: Meter) -> None:
        self.worker = worker
        self.meter = meter

    def failed(self, request: Any, error: Exception) -> None:
        """Notes and logs an error for those who look after the worker."""
        said = f"{type(error).__name__}: {error}"[:MAX_MESSAGE]
        is_cut_off = isinstance(error, grpc.aio.BaseError)  # by the wire, or as the server ends
        if (not isinstance(error, BackhaulError) and not is_cut_off) or type(error) is WorkerError:
            self.worker.last_error = said, time()
        request = getattr(request, "message", request)
        key = getattr(request, "key", request)
        session = self.worker.sessions.get(getattr(key, "session", ""))
        extra = {}
        if session is not None:
            session.last_error = said
            segment = session.segments.get(getattr(key, "segment", 0))
            extra = about(session.run, segment.name if segment else getattr(request, "name", ""))
        if isinstance(error, BackhaulError):
            logger.debug("refused: %s", said, extra=extra)
        elif is_cut_off:
            logger.info("a request was cut off: %s", said, extra=extra)
        else:
            logger.error("a request failed", exc_info=error, extra=extra)


class Sessions(_Servicer):
    """Opens, keeps and closes sessions."""

    @unary
    async def OpenSession(  # noqa: N802  gRPC's name
        self, request: session_pb2.OpenSessionRequest, context: Context
    ) -> session_pb2.OpenSessionResponse:
        """Refuses other versions by name before anything else."""
        if request.protocol_version != PROTOCOL_VERSION:
            raise ProtocolVersionError(
                f"the trainer speaks protocol {request.protocol_version} (backhaul {request.client_version}), this "
                f"worker {PROTOCOL_VERSION} (backhaul {version()}): install the same version on both",
                trainer=request.protocol_version,
                worker=PROTOCOL_VERSION,
            )
        session = self.worker.open_session(request.trainer, request.run, request.client_version)
        return session_pb2.OpenSessionResponse(
            protocol_version=PROTOCOL_VERSION,
            worker_version=version(),
            session=session.id,
            lease_s=self.worker.lease_s,
            budget_bytes=self.worker.store.budget_bytes,
            fingerprint=fingerprint(self.worker.device),
            clock_s=time(),
            memory_path=self.worker.memory_path,
            socket_path=self.worker.socket_path,
        )

    @unary
    async def KeepSession(  # noqa: N802  gRPC's name
        self, request: session_pb2.KeepSessionRequest, context: Context
    ) -> session_pb2.KeepSessionResponse:
        """Renews the lease."""
        session = self.worker.session(request.session)
        session.drift = max(session.drift, request.drift)
        return session_pb2.KeepSessionResponse(draining=self.worker.draining, clock_s=time())

    @unary
    async def CloseSession(  # noqa: N802  gRPC's name
        self, request: session_pb2.CloseSessionRequest, context: Context
    ) -> session_pb2.CloseSessionResponse:
        """Frees all a session held."""
        self.worker.close_session(request.session)
        return session_pb2.CloseSessionResponse()


class Programs(_Servicer):
    """Takes programs."""

    @unary
    async def PutProgram(  # noqa: N802  gRPC's name
        self, request: program_pb2.PutProgramRequest, context: Context
    ) -> program_pb2.PutProgramResponse:
        """Checks it before keeping it."""
        self.worker.session(request.session)
        return program_pb2.PutProgramResponse(address=await self.worker.put_program(request.program))


class Arriving:
    """Tensors on their way into the store. A context manager: what has not been stored at its end is given up."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._charged: list[int] = []
        self._in_place: list[bool] = []
        self._located: list[Callable[[], None]] = []
        self._receiver = Receiver(self._admit, worker.device, self._locate)
        self.memory: Sharing | None = None

    def _admit(self, layout: Layout) -> None:
        self._charged.append(self._worker.expect_tensor(layout))
        self._in_place.append(False)

    def _locate(self, location: tensor_pb2.Location, layout: Layout) -> Callable[[], Tensor]:
        if self.memory is None:
            raise TransferError("a tensor is declared in shared memory, and none is shared")
        tensor, let_go = self.memory.use(location, layout)
        self._located.append(let_go)
        self._in_place[-1] = True
        return lambda: tensor

    def verify(self) -> None:
        """See `Receiver.verify`. May be called in another thread."""
        self._receiver.verify()

    def add(self, carried: Carried[Any]) -> None:
        """Takes in what a message carries. Raises BudgetError, TransferError."""
        self._receiver.add_carried(carried)

    def stored(self) -> int:
        """Stores all that came. Returns how many they are. Raises TransferError."""
        arrived = self._receiver.stored()
        for (address, tensor), is_shared in zip(arrived, self._in_place, strict=True):
            self._worker.store.arrived(address, tensor, self._charged.pop(0), is_shared=is_shared)
        self._located.clear()
        return len(arrived)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for size in self._charged:
            self._worker.store.abandon(size)
        for let_go in self._located:
            let_go()
        del self._receiver  # which knows us: tensors must not wait for the garbage collector


class Tensors(_Servicer):
    """Takes tensors."""

    @unary
    async def PutTensors(  # noqa: N802  gRPC's name
        self, request: AsyncIterator[Carried[tensor_pb2.PutTensorsRequest]], context: Context
    ) -> tensor_pb2.PutTensorsResponse:
        """Charges each at its declaration, stores all once the stream has ended well, none otherwise."""
        session_id, silence_s, now = "", self.worker.lease_s, asyncio.get_running_loop().time
        with Arriving(self.worker) as arriving:
            try:
                async with asyncio.timeout(silence_s) as patience:  # what is declared is held for what is to come
                    async for carried in request:
                        patience.reschedule(now() + silence_s)
                        session_id = session_id or carried.message.session
                        arriving.memory = self.worker.session(session_id).memory
                        arriving.add(carried)
                        if shared := shared_bytes(carried.tensors):
                            self.meter.received(shared)
                            await asyncio.to_thread(arriving.verify)  # while the trainer copies the next
            except TimeoutError:
                raise TransferError(f"nothing came for {silence_s:g} s in the middle of an upload") from None
            return tensor_pb2.PutTensorsResponse(stored=arriving.stored())


class Segments(_Servicer):
    """Saves, recomputes, runs backward, releases."""

    @unary
    async def SaveSegment(  # noqa: N802  gRPC's name
        self, request: segment_pb2.SaveSegmentRequest, context: Context
    ) -> segment_pb2.SaveSegmentResponse:
        """Answers what is missing, or saves."""
        session = self.worker.session(request.key.session)
        self.worker.store.uncache(request.superseded)
        program_missing, missing = self.worker.save(
            session,
            request.key.segment,
            request.program,
            request.sources,
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
        perform = partial(runs.recompute, positions=tuple(request.positions))
        with self.worker.segments.answering(segment, key):
            asked = self.worker.segments.request(segment, key, lambda: perform, request.expected_s)
            self.worker.replay_ahead(session, request.upcoming_segments)
            async for progress in self._wait(segment, asked.answer):
                yield segment_pb2.RecomputeResponse(progress=progress)
            found = asked.answer.result()
            views = [encode_view(view) for view in found.bundle.views]
            result = segment_pb2.RecomputeResult(
                saved_digests=found.saved_digests,
                views=views,
                saved_sketches=_sketches(found),
                timing=_timing(segment, asked, found),
            )
            response = segment_pb2.RecomputeResponse(result=result)
            parcels = batches(found.bundle.parcels, self._placing(session, request.answer))
            for message in encode_all(parcels, response.TENSORS_FIELD_NUMBER, response):
                yield message

    @stream
    async def Backward(  # noqa: N802  gRPC's name
        self, carried: Carried[segment_pb2.BackwardRequest], context: Context
    ) -> AsyncIterator[segment_pb2.BackwardResponse | bytes]:
        """Streams progress, then digests and contributions."""
        with self._backward(carried) as (segment, asked):
            async for progress in self._wait(segment, asked.answer):
                yield segment_pb2.BackwardResponse(progress=progress)
            place = self._placing(segment.session, carried.message.answer)
            for message in _backward_answer(segment, asked, place):
                yield message

    async def ShortBackwards(  # noqa: N802  gRPC's name
        self, requests: AsyncIterator[Carried[segment_pb2.BackwardRequest]], context: Context
    ) -> AsyncIterator[segment_pb2.BackwardResponse | bytes]:
        """Answers what it can with one message, soon. All else, errors too, is left to `Backward`."""
        async for carried in requests:
            started = perf_counter()
            try:
                answer = await self._short_answer(carried)
            except BackhaulError:
                answer = None
            yield segment_pb2.BackwardResponse() if answer is None else answer
            if answer is not None:
                self.meter.call("Backward", perf_counter() - started, failed=False)

    async def _short_answer(self, carried: Carried[segment_pb2.BackwardRequest]) -> bytes | None:
        with self._backward(carried) as (segment, asked):
            await asyncio.wait([asked.answer], timeout=PROGRESS_INTERVAL_S)
            if not asked.answer.done() or asked.answer.result().bundle.size_bytes > CHUNK_BYTES:
                return None
            return next(_backward_answer(segment, asked))

    @contextmanager
    def _backward(self, carried: Carried[segment_pb2.BackwardRequest]) -> Iterator[tuple[Segment, Request]]:
        """Around a backward that was asked for, and its answer."""
        request = carried.message
        session = self.worker.session(request.key.session)
        segment = self.worker.segment(session, request.key.segment)
        addresses = {gradient.output: gradient.tensor for gradient in request.gradients}
        if segment.work is None or any(output >= len(segment.work.program.outputs) for output in addresses):
            raise ProgramError(f"gradients are given for outputs {sorted(addresses)} of {segment.name}")
        with Arriving(self.worker) as arriving:
            arriving.add(carried)
            arriving.stored()
        state = decode_state(request.ambient_state)
        summed = tuple(request.summed_sources)
        start = Start(tuple(sorted(addresses.items())), state, request.wants_digests, summed)
        slots = {each.source: each.slot for each in request.slots}
        if max(slots, default=0) >= max(1, len(segment.work.sources)):
            raise ProgramError(f"slots are named for sources {sorted(slots)} of {segment.name}")
        keep = Keep(slots, request.pass_number) if slots else None

        def prepare() -> Perform:
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
        self._commit(session, request.commits)
        answer = self.worker.segments.sums(session).collect(request.commits.round, request.count)
        session.answers += 1
        try:
            while not answer.done():
                self.worker.session(session.id)
                yield segment_pb2.CollectGradientsResponse(progress=segment_pb2.Progress())
                await asyncio.wait([answer], timeout=PROGRESS_INTERVAL_S)
            found = answer.result()
            result = segment_pb2.CollectGradientsResult(slots=found)
            response = segment_pb2.CollectGradientsResponse(result=result)
            parcels = batches(found.values(), self._placing(session, request.answer))
            for message in encode_all(parcels, response.TENSORS_FIELD_NUMBER, response):
                yield message
        finally:
            session.answers -= 1

    def _commit(self, session: Session, commits: segment_pb2.Commits) -> None:
        backwards = [(key.segment, key.backward) for key in commits.backwards]
        self.worker.segments.sums(session).commit(commits.round, commits.first, backwards)

    def _placing(self, session: Session, answer: int) -> Placing:
        """Puts tensors of an answer into memory that its trainer shares; without any they go as chunks."""
        if not answer or session.memory is None:
            return lambda _: None
        put = session.memory.answering(answer)

        def place(parcel: Parcel) -> tensor_pb2.Location | None:
            location = put(parcel)
            if location is not None:
                self.meter.sent(parcel.layout.payload_bytes)
            return location

        return place

    async def _wait(self, segment: Segment, answer: "asyncio.Future[Finished]") -> AsyncIterator[segment_pb2.Progress]:
        """Says how far a request is until it is done. Keeps its session alive meanwhile."""
        while not answer.done():
            running, ahead_s = self.worker.segments.executor.place(segment.job)
            self.worker.session(segment.session.id)
            yield segment_pb2.Progress(running=running, ahead_s=ahead_s)
            await asyncio.wait([answer], timeout=PROGRESS_INTERVAL_S)


def _backward_answer(segment: Segment, asked: Request, place: Placing = lambda _: None) -> Iterator[bytes]:
    found = asked.answer.result()
    contributions = [
        segment_pb2.Contribution(source=source, kept=position in found.kept)
        for position, source in enumerate(found.sources)
    ]
    for view in found.bundle.views:
        contributions[view.position].view.CopyFrom(encode_view(view))
    result = segment_pb2.BackwardResult(
        saved_digests=found.saved_digests,
        contributions=contributions,
        tensor_digests=found.tensor_digests,
        saved_sketches=_sketches(found),
        timing=_timing(segment, asked, found),
        chained_gradients=[
            segment_pb2.SourceGradient(source=source, tensor=parcel.address) for source, parcel in found.chained.items()
        ],
    )
    response = segment_pb2.BackwardResponse(result=result)
    return encode_all(batches(found.bundle.parcels, place), response.TENSORS_FIELD_NUMBER, response)


def _sketches(found: Finished) -> list[segment_pb2.Sketch]:
    return [segment_pb2.Sketch(numbers=numbers) for numbers in found.saved_sketches]


def _timing(segment: Segment, asked: Request, found: Finished) -> segment_pb2.Timing:
    was_ahead = found.recompute_at_s < asked.came_at_s
    return segment_pb2.Timing(
        queued_at_s=segment.queued_at_s if was_ahead else asked.came_at_s,
        recompute_at_s=found.recompute_at_s,
        recompute_s=found.recompute_s,
        requested_at_s=asked.came_at_s,
        backward_at_s=found.backward_at_s,
        backward_s=found.backward_s,
    )


class Telemetry(_Servicer):
    """Tells how the worker is, and what trainers told it."""

    def __init__(self, worker: Worker, meter: Meter) -> None:
        super().__init__(worker, meter)
        self._started = monotonic()
        self._reports = Reports()

    @unary
    async def PutReports(  # noqa: N802  gRPC's name
        self, request: telemetry_pb2.PutReportsRequest, context: Context
    ) -> telemetry_pb2.PutReportsResponse:
        """Takes a report of a session's trainer."""
        self.worker.session(request.session)
        self._reports.put(request.report)
        return telemetry_pb2.PutReportsResponse()

    @unary
    async def GetTelemetry(  # noqa: N802  gRPC's name
        self, request: telemetry_pb2.GetTelemetryRequest, context: Context
    ) -> telemetry_pb2.GetTelemetryResponse:
        """The worker as it is now."""
        worker, usage, now = self.worker, self.worker.store.usage(), monotonic()
        reports, has_more = self._reports.after(request.after_report if request.epoch == worker.epoch else 0)
        last_error, last_error_at_s = worker.last_error
        return telemetry_pb2.GetTelemetryResponse(
            worker_version=version(),
            epoch=worker.epoch,
            device=str(worker.device),
            draining=worker.draining,
            uptime_s=now - self._started,
            memory=telemetry_pb2.MemoryTelemetry(
                budget_bytes=usage.budget,
                segment_bytes=usage.segments,
                cached_bytes=usage.cached,
                working_bytes=usage.working,
                result_bytes=usage.results,
                resident_bytes=resident_bytes(),
                refusals=usage.refusals,
                evictions=usage.evictions,
            ),
            sessions=[
                telemetry_pb2.SessionTelemetry(
                    trainer=session.trainer,
                    segments=len(session.segments),
                    idle_s=max(0.0, now - (session.expires_at - worker.lease_s)),
                    drift=session.drift,
                    run=session.run,
                    held_bytes=worker.store.held_bytes(segment.key for segment in session.segments.values()),
                    client_version=session.client_version,
                    last_error=session.last_error,
                )
                for session in worker.sessions.values()
            ],
            rpcs=[
                telemetry_pb2.RpcTelemetry(
                    method=name, calls=found.calls, errors=found.errors, total_s=found.total_s, buckets=found.buckets
                )
                for name, found in sorted(self.meter.methods.items())
            ],
            recomputed_segments=worker.segments.recomputed,
            received_bytes=self.meter.bytes["received"],
            sent_bytes=self.meter.bytes["sent"],
            queued_requests=len(worker.segments.executor),
            fingerprint=fingerprint(worker.device),
            last_error=last_error,
            last_error_at_s=last_error_at_s,
            reports=reports,
            has_more_reports=has_more,
            guessed_segments=worker.segments.guessed,
            wasted_guesses=worker.segments.wasted,
        )


def add_services(server: grpc.aio.Server, worker: Worker) -> None:
    """Adds all of the worker's services to a server that has not started."""
    meter = Meter()
    for file, servicer in (
        (session_pb2, Sessions(worker, meter)),
        (program_pb2, Programs(worker, meter)),
        (tensor_pb2, Tensors(worker, meter)),
        (segment_pb2, Segments(worker, meter)),
        (telemetry_pb2, Telemetry(worker, meter)),
    ):
        for service in file.DESCRIPTOR.services_by_name.values():
            handlers = {method.name: _handler(method, servicer, meter) for method in service.methods}
            server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service.full_name, handlers)])


_MAKERS: Mapping[tuple[bool, bool], Any] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}
"""By whether requests and answers are streams."""


def _handler(method: MethodDescriptor, servicer: _Servicer, meter: Meter) -> Any:
    """As the generated stubs make them, but with tensors read and written by `splicing`, and bytes counted."""
    read = deserializer(GetMessageClass(method.input_type))

    def received(data: bytes) -> Any:
        meter.received(len(data))
        return read(data)

    def sent(message: Message | bytes) -> bytes:
        data = serialize(message)
        meter.sent(len(data))
        return data

    make = _MAKERS[method.client_streaming, method.server_streaming]
    return make(getattr(servicer, method.name), request_deserializer=received, response_serializer=sent)
