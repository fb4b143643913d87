"""The telemetry of a trainer: counted during training, and sent by a thread of its own.

NOTE [Never in the way]
1. Training only adds numbers and appends to lists. The thread does everything that takes longer or may fail.
2. Lists are bounded. Entries that do not fit are dropped and counted, and so are calls that cannot be sent. Steps and
   events that cannot be sent are sent again: while no worker answers, they are what the trainer did by itself.
3. A call is reported when no backward can need its segment any more, or when its step has ended after its
   recomputation.
4. Frames die at any time and in any thread. Their death notices are appended to a queue, see `_endings`.
"""

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from time import time
from typing import TYPE_CHECKING, Any, Protocol

import torch

from backhaul._observe.ranks import rank_and_world
from backhaul._observe.report import BlockReport, Decision, StepsReport
from backhaul._observe.run_events import RunEvents
from backhaul_proto.v1 import telemetry_pb2
from backhaul_runtime.process.death_queue import DeathNotice, DeathQueue
from backhaul_runtime.process.latch import Latch
from backhaul_runtime.process.resources import resident_bytes
from backhaul_runtime.process.threads import only_in
from backhaul_runtime.tensors.durations import Duration, DurationSum

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from torch import Tensor

    from backhaul._observe.opentelemetry import Traces

logger = logging.getLogger("backhaul")
INTERVAL_S = 1.0
MAX_CALLS = 4096
MAX_STEPS = 1000
CALLS_PER_REPORT = 200
"""Upper bounds of a report. They keep it below the half MiB that a worker accepts."""

_CLOSE_S = 1.0

Deliver = Callable[[telemetry_pb2.TrainerReport], bool]
"""Sends a report and returns whether it arrived. The telemetry thread calls it; it may block and raise."""
Links = Callable[[], list[telemetry_pb2.Link]]
"""Returns the connections to all workers, as of now. The telemetry thread calls it."""


class ReportedCall(Protocol):
    """A checkpointed call that is reported: `CallLog`, which imports this module.

    Attributes:
        step: The number of its step.
        decision: Where its segment was recomputed last, and what that returned; None until then.
    """

    step: int
    decision: Decision | None

    @property
    def is_gone(self) -> bool:
        """Whether forward has ended and no backward can need the segment any more."""

    def to_message(self) -> telemetry_pb2.SegmentCall:
        """Returns the call as a message of a report."""


@dataclass(eq=False)
class _Totals:
    """The sums of the step in progress."""

    number: int
    started_at_s: float = 0.0
    calls: int = 0
    names: Counter[str] = field(default_factory=Counter)
    decisions: Counter[Decision] = field(default_factory=Counter)
    fallbacks: int = 0
    wait: DurationSum = field(default_factory=DurationSum)
    overhead_s: float = 0.0
    spared: DurationSum = field(default_factory=DurationSum)
    up_bytes: int = 0
    down_bytes: int = 0
    saved_bytes: int = 0
    spared_bytes: int = 0
    block: Callable[[], BlockReport] | None = None


@dataclass(eq=False)
class _Ended:
    """The sums of all steps that have ended."""

    count: int = 0
    wait: DurationSum = field(default_factory=DurationSum)
    overhead_s: float = 0.0
    spared: DurationSum = field(default_factory=DurationSum)

    def add(self, step: _Totals) -> None:
        self.count += 1
        self.wait.add_all(step.wait)
        self.overhead_s += step.overhead_s
        self.spared.add_all(step.spared)


class Telemetry:
    """Counts the steps of a session and sends reports after `start`. `close` ends it. Thread-safe.

    Args:
        deliver: Sends a report to a worker. Called by the telemetry thread.
        run: The description of the session, sent with each report.
        traces: Also gets each report; None for no traces.
        events: The events of the session, which are reported with the steps.
        links: Returns the connections to all workers, which are reported with the steps.

    Attributes:
        events: The events of the session that were not reported yet.
    """

    def __init__(
        self,
        deliver: Deliver,
        run: telemetry_pb2.Run,
        traces: "Traces | None" = None,
        events: RunEvents | None = None,
        links: Links = list,
    ) -> None:
        self._deliver = deliver
        self.events = events if events is not None else RunEvents()
        self._links = links
        self._run = run
        self._traces = traces
        # Guards all counts and queues.
        self._lock = threading.RLock()
        self._now = _Totals(0)
        self._calls: deque[ReportedCall] = deque()
        self._steps: deque[tuple[telemetry_pb2.Step, _Totals, Any, Context | None]] = deque()
        self._unsent: deque[telemetry_pb2.Step] = deque()
        self._saved_bytes = 0
        self._peak_saved_bytes = 0
        self._drift: float | None = None
        self._death_notices: deque[DeathNotice] = deque()  # Rule 4
        self._endings = DeathQueue(self._death_notices.append)
        self._dropped = 0
        self._ended = _Ended()
        self._end = Latch()
        self._thread = threading.Thread(target=self._serve, name="backhaul-telemetry", daemon=True)

    def start(self) -> None:
        """Starts the thread that sends reports."""
        self._thread.start()

    def close(self) -> None:
        """Sends the remaining reports and ends the thread. Waits only briefly."""
        self._end.set()
        if self._thread.ident is not None:
            self._thread.join(_CLOSE_S)

    def forked(self) -> None:
        """Resets the state in the child of a fork, where the thread that holds the lock may not exist."""
        self._lock = threading.RLock()
        self.events.forked()

    def began(self, call: ReportedCall, name: str) -> tuple[int, int, int]:
        """Notes the start of a call.

        Returns its step, its number in the step, and its number among calls of its name.
        """
        with self._lock:
            now = self._now
            if not now.calls:
                now.started_at_s = time()
            now.calls += 1
            now.names[name] += 1
            self._calls.append(call)
            if len(self._calls) > MAX_CALLS:  # Rule 2
                self._calls.popleft()
                self._dropped += 1
            return now.number, now.calls - 1, now.names[name] - 1

    def hold(self, frame: object, saved_bytes: int, overhead_s: float) -> DeathNotice:
        """Notes the end of a forward, which spares memory until its frame has died."""
        with self._lock:
            while self._death_notices:
                self._saved_bytes -= self._endings.take(self._death_notices.popleft())
            self._saved_bytes += saved_bytes
            self._now.saved_bytes = max(self._now.saved_bytes, self._saved_bytes)
            self._now.overhead_s += overhead_s
        return self._endings.watch(frame, saved_bytes)

    def recomputed(self, decision: Decision, wait: Duration, spared: Duration, factor: float) -> None:
        """Counts a recomputation.

        Args:
            decision: Where it ran, and what it returned.
            wait: For how long backward was blocked.
            spared: What the trainer was spared, before it is multiplied by `factor`.
            factor: The number that `spared` is multiplied by, at least 1.
        """
        with self._lock:
            self._now.decisions[decision] += 1
            self._now.wait.add(wait)
            self._now.spared.add(spared, factor)
            if decision in {Decision.GRADIENTS, Decision.ACTIVATIONS}:
                self._drift = self._drift or 0.0

    def drifted(self, drift: float) -> None:
        """Notes the relative difference between values of a worker and those of forward; 0 if all bits are equal."""
        with self._lock:
            self._drift = max(self._drift or 0.0, drift)

    def waited(self, wait: Duration) -> None:
        """Adds a time for which backward was blocked."""
        with self._lock:
            self._now.wait.add(wait)

    def moved(self, up_bytes: int, down_bytes: int) -> None:
        """Counts the bytes of messages."""
        with self._lock:
            self._now.up_bytes += up_bytes
            self._now.down_bytes += down_bytes

    def spared(self, size_bytes: int) -> None:
        """Counts bytes that were not sent because only the differences of parameters were."""
        with self._lock:
            self._now.spared_bytes += size_bytes

    def fell_back(self) -> None:
        """Counts a segment that was meant for a worker but ran on the trainer."""
        with self._lock:
            self._now.fallbacks += 1

    def block_ended(self, block: Callable[[], BlockReport]) -> None:
        """Notes an accumulation block that has just ended, whose report is read later."""
        with self._lock:
            self._now.block = block

    def step(self, loss: "Tensor | float | None" = None) -> None:
        """Ends a step. A step without calls is not counted.

        Args:
            loss: The loss of the step; None if it is unknown.
        """
        with self._lock:
            now = self._now
            if not now.calls:
                return
            self._now = _Totals(now.number + 1)
            self._peak_saved_bytes = max(self._peak_saved_bytes, now.saved_bytes)
            self._ended.add(now)
            step = telemetry_pb2.Step(
                number=now.number,
                started_at_s=now.started_at_s,
                duration_s=max(0.0, time() - now.started_at_s),
                calls=now.calls,
                gradients=now.decisions[Decision.GRADIENTS],
                activations=now.decisions[Decision.ACTIVATIONS],
                on_trainer=now.decisions[Decision.TRAINER],
                fallbacks=now.fallbacks,
                overhead_s=now.overhead_s,
                up_bytes=now.up_bytes,
                down_bytes=now.down_bytes,
                spared_bytes=now.spared_bytes,
                saved_bytes=max(0, now.saved_bytes),
                peak_saved_bytes=max(0, self._peak_saved_bytes),
            )
            context = self._traces.context() if self._traces is not None else None
            self._steps.append((step, now, loss.detach() if isinstance(loss, torch.Tensor) else loss, context))
            if len(self._steps) > MAX_STEPS:  # Rule 2
                self._steps.popleft()
                self._dropped += 1

    @only_in("backhaul-telemetry")
    def _serve(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._end.wait(INTERVAL_S)
            try:
                for report in self._reports(is_last=is_last):
                    self._send(report)
            except Exception:  # Rule 1
                logger.debug("Telemetry failed.", exc_info=True)

    @only_in("backhaul-telemetry")
    def _send(self, report: telemetry_pb2.TrainerReport) -> None:
        has_arrived = False
        try:
            has_arrived = self._deliver(report)
        except Exception:  # Rule 1
            logger.debug("A report could not be sent.", exc_info=True)
        if not has_arrived:
            self._give_back(report)

    @only_in("backhaul-telemetry")
    def _trace(self, report: telemetry_pb2.TrainerReport, contexts: "Mapping[int, Context]") -> None:
        if self._traces is not None:
            try:
                self._traces.export(report, contexts)
            except Exception:  # the user's SDK failed, but workers still get the report
                logger.debug("Traces failed.", exc_info=True)

    @only_in("backhaul-telemetry")
    def _give_back(self, report: telemetry_pb2.TrainerReport) -> None:
        """Keeps the steps and events of a report that was not sent, and counts what is dropped (Rule 2)."""
        self._unsent.extend(report.steps)
        surplus = max(0, len(self._unsent) - MAX_STEPS)
        for _ in range(surplus):
            self._unsent.popleft()
        with self._lock:
            self._dropped += surplus + len(report.calls)
        self.events.give_back(report.events)

    @property
    def steps(self) -> StepsReport:
        """What the steps have taken that have ended. Waits for what is being measured."""
        with self._lock:
            ended = replace(self._ended)
        return StepsReport(
            ended.count, ended.wait.wait(), ended.overhead_s, ended.spared.wait(), max(0, self._peak_saved_bytes)
        )

    def _reports(self, *, is_last: bool) -> Iterator[telemetry_pb2.TrainerReport]:
        """Yields the reports to send now."""
        with self._lock:
            current = self._now.number
            reported = [call for call in self._calls if is_last or _has_ended(call, current)]
            if reported:
                chosen = set(map(id, reported))
                self._calls = deque(call for call in self._calls if id(call) not in chosen)
            steps = list(self._steps)
            self._steps.clear()
        if is_last:
            self._run.is_closed = True
        if not self._run.world_size:  # the process group may be made after the session
            self._run.rank, self._run.world_size = rank_and_world()
        messages = [_with_loss(_measured(step, totals), loss) for step, totals, loss, _ in steps]
        events = self.events.take(is_last=is_last)
        was_told = False
        if self._unsent:  # alone, because they were traced before, and in front, because they are older
            late = list(self._unsent)
            self._unsent.clear()
            yield telemetry_pb2.TrainerReport(run=self._run, steps=late, dropped=self._dropped, sent_at_s=time())
        contexts = {step.number: context for step, *_, context in steps if context is not None}
        while messages or reported or events or is_last:
            report = telemetry_pb2.TrainerReport(
                run=self._run,
                steps=messages,
                calls=[call.to_message() for call in reported[:CALLS_PER_REPORT]],
                dropped=self._dropped,
                events=events,
                links=self._links() if not was_told else [],
                sent_at_s=time(),
                drift=self._drift,
            )
            was_told = True
            self._trace(report, contexts)
            yield report
            messages, events, reported, is_last = [], [], reported[CALLS_PER_REPORT:], False


def _has_ended(call: ReportedCall, current_step: int) -> bool:
    """Whether a call can be reported (Rule 3)."""
    return call.is_gone or (call.decision is not None and call.step < current_step)


def _block_message(block: BlockReport) -> telemetry_pb2.Block:
    return telemetry_pb2.Block(
        micro_batches=block.micro_batches,
        took_s=block.took_s,
        others_s=block.others_s,
        shares=[
            telemetry_pb2.Share(worker=worker, segments=helper.segments, segment_s=helper.segment_s)
            for worker, helper in [("", block.trainer), *block.workers.items()]
        ],
        pending_gradient_bytes=block.pending_gradient_bytes,
    )


def _measured(step: telemetry_pb2.Step, totals: _Totals) -> telemetry_pb2.Step:
    """Adds what the step's totals measure. Waits for their device."""
    step.wait_s, step.spared_s = totals.wait.wait(), totals.spared.wait()
    if totals.block is not None:
        step.block.CopyFrom(_block_message(totals.block()))
    return step


def _with_loss(step: telemetry_pb2.Step, loss: "Tensor | float | None") -> telemetry_pb2.Step:
    step.peak_bytes = torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else resident_bytes("VmHWM")  # type: ignore[no-untyped-call]
    if loss is not None:
        with suppress(TypeError, ValueError, RuntimeError):  # the loss is not a single number
            step.loss = float(loss)
    return step
