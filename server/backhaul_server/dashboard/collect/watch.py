"""Polls workers once a second and collects the reports of their trainers."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from typing import Any

import grpc

from backhaul_proto.v1 import telemetry_pb2
from backhaul_runtime.errors import BackhaulError, SettingError, TransferError
from backhaul_runtime.process.addresses import Address
from backhaul_runtime.process.credentials import bearer
from backhaul_runtime.process.discovery import LOOK_INTERVAL_S, Resolver
from backhaul_runtime.process.tls import TlsFiles
from backhaul_runtime.wire.protocol import CHANNEL_OPTIONS, options_to
from backhaul_runtime.wire.splicing import accepted
from backhaul_runtime.wire.stubs import stub
from backhaul_server.dashboard.collect.durations import Tally
from backhaul_server.dashboard.collect.event_log import EventLog, of_trainer
from backhaul_server.dashboard.collect.held_memory import HeldMemory
from backhaul_server.dashboard.collect.links import Alignment, alignment
from backhaul_server.dashboard.collect.plain_words import why_unanswered
from backhaul_server.dashboard.collect.sanitize import LATEST_S, clean_report
from backhaul_server.dashboard.collect.trainers import Trainers
from backhaul_server.dashboard.collect.training_runs import TrainerRun
from backhaul_server.dashboard.collect.watched import Watched
from backhaul_server.dashboard.schemas.events import EventEntry

INTERVAL_S = 1.0
ANSWER_S = 1.5
"""Deadline of a request: the failure of a worker is noticed within this time and the interval."""
_PAGES = 8  # the number of report pages that one poll fetches
_SILENT_CALLS = 4
"""After this many failures in a row the connection is replaced: a machine that vanished never closes the old one."""
_LATE_S = 10.0
"""The longest time for which a trainer may have held back a report, in seconds."""

logger = logging.getLogger("backhaul.dashboard")


class Watch:
    """Watches workers and the trainers that report to them. Run `run` as a task, and end it by cancelling.

    Args:
        resolvers: The resolvers that name the workers.
        tokens: Tokens of the workers, None for no token: one for all workers, or one each in the order of resolvers.
        keep: Called with every sanitized report, also with repeated ones, and the seconds to add to its times for this
            process's clock. Must not block.
        tls: The files with which the dashboard speaks TLS with workers that listen on TCP; None: without TLS.
        keep_event: Called with every new event, once. Must not block.

    Attributes:
        workers: The watched workers. Those of a file or of a DNS name are watched while it names them.
        calls: The tally of the calls of all workers together.
        trainers: The runs that trainers reported.
        held: The bytes held for runs on workers over time.
        events: What trainers reported to have happened, and what the dashboard saw itself.
    """

    def __init__(
        self,
        resolvers: Sequence[Resolver],
        tokens: Sequence[str | None] = (None,),
        keep: Callable[[telemetry_pb2.TrainerReport, float], None] | None = None,
        tls: TlsFiles | None = None,
        keep_event: Callable[[EventEntry], None] | None = None,
    ) -> None:
        if len(tokens) not in {1, len(resolvers)}:
            raise ValueError(
                f"{len(tokens)} tokens for {len(resolvers)} resolvers: give one for all, or one each in their order"
            )
        self.calls = Tally()
        self._resolvers = list(zip(resolvers, list(tokens) * (len(resolvers) if len(tokens) == 1 else 1), strict=True))
        self._unread = {resolver.text for resolver, _ in self._resolvers if not resolver.is_fixed}
        fixed = [resolver for resolver in resolvers if resolver.is_fixed]
        self.events = EventLog(keep_event)
        self.workers = [
            Watched(address, self.calls, self.events) for resolver in fixed for address in resolver.resolve()
        ]
        self.trainers = Trainers(self.events)
        self.held = HeldMemory()
        self._keep, self._tls = keep, tls

    @property
    def is_ready(self) -> bool:
        """Whether every resolver was read, and every worker has answered, or is out of reach."""
        return not self._unread and all(worker.was_asked for worker in self.workers)

    def workers_of(self, run: TrainerRun) -> dict[str, Watched]:
        """Returns the watched workers of a run by the addresses that its trainer was given.

        A trainer may reach a worker by another address than the dashboard does. If one of each is left over, and the
        worker has a session of the run, they are the same.
        """
        watched = {worker.address.text: worker for worker in self.workers}
        addresses = {*run.about.workers, *run.links}
        matched = {address: watched[address] for address in addresses if address in watched}
        left = [address for address in addresses if address not in watched]
        others = [
            worker
            for worker in self.workers
            if worker.address.text not in matched and any(session.run == run.id for session in worker.sessions())
        ]
        if len(left) == len(others) == 1:
            matched[left[0]] = others[0]
        return matched

    def note_cut_off(self) -> None:
        """Notes of each run whether no report can arrive now, because all of its watched workers are unreachable."""
        for run in self.trainers:
            states = {worker.state for worker in self.workers_of(run).values()}
            run.is_cut_off = states == {"unreachable"}

    def alignment(self, run: TrainerRun) -> Alignment | None:
        """Returns how the clock of a run's trainer compares with this process's; None if that is unknown."""
        now_s = time.time()
        clocks = {address: worker.clock.estimate(now_s) for address, worker in self.workers_of(run).items()}
        return alignment(
            run.links.values(), {address: (clock.offset_s, clock.error_s) for address, clock in clocks.items()}
        )

    def shift_s(self, run: TrainerRun | None) -> float:
        """Returns the seconds to add to times of a run's trainer for this process's clock; 0 if that is unknown."""
        aligned = self.alignment(run) if run is not None and run.links else None
        return aligned.shift_s if aligned is not None else 0.0

    async def run(self) -> None:
        """Polls each worker once a second. A worker that does not answer delays no other."""
        with ExitStack() as ending:
            for resolver, _ in self._resolvers:
                ending.callback(resolver.close)
            async with asyncio.TaskGroup() as tasks:
                fixed = iter(list(self.workers))
                for resolver, token in self._resolvers:
                    if resolver.is_fixed:
                        tasks.create_task(self._follow(next(fixed), token))
                    else:
                        tasks.create_task(self._look(resolver, token, tasks))
                while True:
                    await asyncio.sleep(INTERVAL_S)
                    self.held.sample(time.time(), self.workers, self.trainers)
                    self.note_cut_off()

    async def _look(self, resolver: Resolver, token: str | None, tasks: asyncio.TaskGroup) -> None:
        """Asks a resolver once a second, and watches the workers that it names."""
        following: dict[str, tuple[Watched, asyncio.Task[None]]] = {}
        trouble = ""
        while True:
            try:
                named = {address.target: address for address in await asyncio.to_thread(resolver.resolve)}
            except BackhaulError as error:  # Rule 3 of NOTE [Resolvers]
                if error.message != trouble:
                    trouble = error.message
                    logger.warning("%s. Its workers stay as they are.", trouble)
            else:
                trouble = ""
                for target in following.keys() - named.keys():
                    worker, task = following.pop(target)
                    task.cancel()
                    self.workers = [other for other in self.workers if other is not worker]
                for target in named.keys() - following.keys() - {worker.address.target for worker in self.workers}:
                    worker = Watched(named[target], self.calls, self.events)
                    self.workers = [*self.workers, worker]  # replaced as a whole, because other threads read it
                    following[target] = worker, tasks.create_task(self._follow(worker, token))
            self._unread.discard(resolver.text)
            await asyncio.sleep(LOOK_INTERVAL_S)

    async def _follow(self, worker: Watched, token: str | None) -> None:
        while True:
            try:
                opened = self._channel_to(worker.address)
            except SettingError as error:  # the files may be usable again later
                worker.failed(error.message)
                await asyncio.sleep(INTERVAL_S)
                continue
            async with opened as channel:
                ask = stub(channel, telemetry_pb2.DESCRIPTOR.services_by_name["TelemetryService"]).GetTelemetry
                silent = 0
                while silent < _SILENT_CALLS:
                    due_s = time.monotonic() + INTERVAL_S
                    silent = 0 if await self._ask(worker, ask, token) else silent + 1
                    await asyncio.sleep(max(0.0, due_s - time.monotonic()))

    def _channel_to(self, address: Address) -> grpc.aio.Channel:
        """Opens a channel. Raises SettingError if the files of TLS cannot be used now."""
        if self._tls is None or address.unix_path:
            return grpc.aio.insecure_channel(address.target, options=CHANNEL_OPTIONS)
        credentials = grpc.ssl_channel_credentials(**self._tls.of_channel)
        return grpc.aio.secure_channel(address.target, credentials, options=options_to(address))

    async def _ask(self, worker: Watched, ask: Callable[..., Awaitable[Any]], token: str | None) -> bool:
        """Polls once, and again while there are more reports. Returns False if the worker did not answer."""
        try:
            for _ in range(_PAGES):
                request = telemetry_pb2.GetTelemetryRequest(after_report=worker.after_report, epoch=worker.epoch)
                asked_at_s = time.time()
                answer = accepted(await ask(request, timeout=ANSWER_S, metadata=bearer(token)))
                if 0 < answer.clock_s < LATEST_S:
                    worker.clock.compare(asked_at_s, answer.clock_s, time.time())
                has_more = answer.has_more_reports and len(answer.reports) > 0
                await self._take(worker, answer)
                if not has_more:
                    worker.caught_up_at_s = time.time()
                    break
        except grpc.aio.AioRpcError as error:
            worker.failed(why_unanswered(error.code(), error.details() or ""))
            return error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED
        except TransferError as error:
            worker.failed(f"its answer was damaged on the way: {error.message}")
        except Exception as error:  # one worker's answer must not end the watch over the others
            logger.exception("The answer of worker %s could not be processed.", worker.address.text)
            worker.failed(f"its answer was not understood: {type(error).__name__}: {error}")
        return True

    async def _take(self, worker: Watched, answer: telemetry_pb2.GetTelemetryResponse) -> None:
        since_s = max(0.0, worker.caught_up_at_s - _LATE_S)
        after = worker.after_report if answer.epoch == worker.epoch else 0
        for report in answer.reports:
            if report.number <= after:
                continue
            after = report.number
            if clean_report(report.report):
                self.trainers.take(report.report, time.time(), since_s)
                shift_s = self.shift_s(self.trainers.find(report.report.run.id))
                if self._keep is not None:
                    self._keep(report.report, shift_s)
                self._take_events(report.report, shift_s)
            else:
                self.trainers.refused_reports += 1
            await asyncio.sleep(0)  # lets other tasks run between two pages
        if answer.reports:
            # A part of a message keeps the whole message alive, so what is kept must be copied out of the reports.
            answer.ClearField("reports")
            alone = telemetry_pb2.GetTelemetryResponse()
            alone.CopyFrom(answer)
            answer = alone
        worker.answered(answer)
        worker.after_report = after
        for session in answer.sessions:
            if session.run:
                self.trainers.heard(session.run, worker.answered_at_s - session.idle_s)

    def _take_events(self, report: telemetry_pb2.TrainerReport, shift_s: float) -> None:
        now_s = time.time()
        for reported in report.events:
            event = of_trainer(report.run.id, reported, min(now_s, max(0.0, reported.at_s + shift_s)))
            if event is not None:
                self.events.add(event)
