"""One training run, assembled from the reports of its trainer."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import add
from statistics import median

from backhaul_proto.v1 import telemetry_pb2
from backhaul_server.dashboard.collect.links import LinkRecord, take_links
from backhaul_server.dashboard.collect.sanitize import CALLS_OF_A_STEP
from backhaul_server.dashboard.collect.segments import SegmentTable
from backhaul_server.dashboard.collect.series import LARGEST, Series
from backhaul_server.dashboard.collect.step_points import step_row
from backhaul_server.dashboard.collect.totals import RecentTotals, Totals
from backhaul_server.dashboard.schemas.fields import RunState

STEPS = 64
"""The number of recent steps that are kept separately. Reports on older steps are ignored."""
SILENT_S = 30.0
LOST_S = 300.0
_SERIES_STEPS = 4_096
_LANES = len(telemetry_pb2.Lane.values())
_MEDIAN_STEPS = 50


@dataclass(slots=True)
class StepReport:
    """The reports on one step.

    Attributes:
        step: The step itself; None until it has ended.
        seen: A bit mask; bit n is set once call n was reported.
        lanes_s: Seconds of the spans of its calls, by lane.
        calls: Serialized SegmentCalls by number, if the run has detail. As objects they would take five times the
            memory.
    """

    step: telemetry_pb2.Step | None = None
    seen: int = 0
    lanes_s: list[float] = field(default_factory=lambda: [0.0] * _LANES)
    calls: dict[int, bytes] = field(default_factory=dict)


def _step_number(part: telemetry_pb2.Step | telemetry_pb2.SegmentCall) -> int:
    return part.number if isinstance(part, telemetry_pb2.Step) else part.step


def state_of(is_closed: bool, unheard_s: float) -> RunState:
    """Returns the state of a run from whether its trainer has closed it, and the seconds since its last report."""
    if is_closed:
        return "ended"
    return "lost" if unheard_s > LOST_S else "silent" if unheard_s > SILENT_S else "running"


class Detail:
    """The data of a run that take much memory.

    Attributes:
        segments: The table of the run's segments.
        steps: One row for each of the last steps, see `step_row`, in the order of the reports.
    """

    def __init__(self, run: str, has_room: Callable[[], bool]) -> None:
        self.segments = SegmentTable(run, has_room)
        self.steps = Series(_SERIES_STEPS, 5)


class TrainerRun:
    """A training run as far as its trainer has reported it. Reports may arrive twice and in any order.

    Attributes:
        about: The trainer's description of the run.
        began_at_s: When the run began, in seconds since 1970; never later than its first report.
        heard_at_s: When its last report or heartbeat arrived, by this process's clock.
        stepped_at_s: When its last reported step ended, in seconds since 1970; 0 before the first.
        dropped: Number of steps and calls that the trainer did not report, or that were not kept.
        steps: Number of reported steps.
        peak_bytes: Peak memory of the trainer so far.
        saved_bytes: The most bytes that autograd saved in segments and the trainer did not keep.
        last_step: The step with the highest number.
        reported_steps: The reports on the last steps, by the number of the step.
        recent: Sums of the last five minutes.
        totals: The sums over all steps and calls.
        detail: The tables of the run; None if there was no room for them.
        calls_bytes: The bytes of all calls that are kept.
        links: The connections to its workers, by the address that the trainer was given.
        drift: The largest relative difference between values of workers and those of forward; None if unknown.
        is_cut_off: Whether no worker of the run answers now, so that no report can arrive.
    """

    def __init__(self, about: telemetry_pb2.Run, now_s: float) -> None:
        self.about = telemetry_pb2.Run()
        self.about.CopyFrom(about)
        self.began_at_s = min(now_s, about.started_at_s)
        self.stepped_at_s = 0.0
        self.heard_at_s = 0.0
        self.first_step_at_s = 0.0
        self.dropped = 0
        self.steps = 0
        self.last_step = telemetry_pb2.Step()
        self.reported_steps: dict[int, StepReport] = {}
        self.recent = RecentTotals()
        self.totals = Totals()
        self.detail: Detail | None = None
        self.calls_bytes = 0
        self.links: dict[str, LinkRecord] = {}
        self._durations_s: deque[float] = deque(maxlen=_MEDIAN_STEPS)
        self.peak_bytes = self.saved_bytes = 0
        self.drift: float | None = None
        self.is_cut_off = False

    @property
    def id(self) -> str:
        """The id of the run, as routes use it."""
        return self.about.id

    def state(self, now_s: float) -> RunState:
        """Returns the state of the run at a time in seconds since 1970."""
        state = state_of(self.about.is_closed, now_s - self.heard_at_s)
        return "silent" if state == "running" and self.is_cut_off else state

    def take(self, report: telemetry_pb2.TrainerReport, now_s: float, since_s: float) -> None:
        """Adds a report that was sanitized.

        Args:
            report: The report of the trainer.
            now_s: The time of this process's clock, in seconds since 1970.
            since_s: When the worker was asked before, by this process's clock, or 0 if that is unknown. Nothing in the
                report is older than that, whatever the trainer's clock says.
        """
        is_closed = self.about.is_closed or report.run.is_closed
        self.about.CopyFrom(report.run)
        self.about.is_closed = is_closed
        self.dropped = max(self.dropped, report.dropped)
        take_links(self.links, report, now_s)
        if report.HasField("drift"):
            self.drift = max(self.drift or 0.0, report.drift)
        heard_at_s = [report.run.started_at_s]
        by_second: dict[int, list[Totals]] = {}
        parts: list[telemetry_pb2.Step | telemetry_pb2.SegmentCall] = [*report.steps, *report.calls]
        # Steps are taken in the order of their numbers, so that no step counts as too old for its own calls.
        for part in sorted(parts, key=_step_number):
            if isinstance(part, telemetry_pb2.Step):
                at_s = max(since_s, min(now_s, part.started_at_s + part.duration_s))
                heard_at_s.append(at_s)
                self._take_step(part, at_s)
            else:
                ends_s = max((span.started_at_s + span.duration_s for span in part.spans), default=now_s)
                ended_at_s = max(since_s, min(now_s, ends_s))
                by_second.setdefault(int(ended_at_s), []).append(self._take_call(part, ended_at_s))
        for second, sums in by_second.items():
            self._count(Totals.of_all(sums), float(second))
        self.heard_at_s = max(self.heard_at_s, since_s, min(now_s, max(heard_at_s)))

    def _reported(self, number: int) -> StepReport | None:
        """The record of a step; None if the step is too old to be kept."""
        if number not in self.reported_steps:
            if len(self.reported_steps) >= STEPS:
                oldest = min(self.reported_steps)
                if number < oldest:
                    return None
                self._forget_calls(self.reported_steps.pop(oldest))
            self.reported_steps[number] = StepReport()
        return self.reported_steps[number]

    def _take_step(self, step: telemetry_pb2.Step, at_s: float) -> None:
        report = self._reported(step.number)
        if report is None or report.step is not None:
            return
        report.step = telemetry_pb2.Step()
        report.step.CopyFrom(step)  # a copy, because a part of a message keeps the whole report alive
        self.steps += 1
        self.first_step_at_s = self.first_step_at_s or at_s
        self.stepped_at_s = max(self.stepped_at_s, at_s)
        if step.number >= self.last_step.number:
            self.last_step = report.step
        self.peak_bytes = max(self.peak_bytes, step.peak_bytes)
        self.saved_bytes = max(self.saved_bytes, step.saved_bytes, step.peak_saved_bytes)
        self._durations_s.append(step.duration_s)
        self._count(Totals.of_step(step), at_s)
        if self.detail is not None:
            *row, ended_at_s = step_row(step)
            self.detail.steps.append(ended_at_s, row)

    def _take_call(self, call: telemetry_pb2.SegmentCall, at_s: float) -> Totals:
        """Keeps a call. Returns what it adds to the sums; nothing if it was reported before."""
        report = self._reported(call.step)
        if report is None or report.seen >> call.number & 1:
            return Totals()
        if call.number >= CALLS_OF_A_STEP:
            self.dropped = min(LARGEST, self.dropped + 1)
            return Totals()
        report.seen |= 1 << call.number
        lanes_s = [0.0] * _LANES
        for span in call.spans:
            lanes_s[span.lane] += span.duration_s
        report.lanes_s = list(map(add, report.lanes_s, lanes_s))
        if self.detail is not None:
            self.detail.segments.take(call, lanes_s, at_s)
            report.calls[call.number] = call.SerializeToString()
            self.calls_bytes += len(report.calls[call.number])
        return Totals.of_call(call, lanes_s)

    def _count(self, sums: Totals, at_s: float) -> None:
        self.recent.add(at_s, sums)
        self.totals = Totals.of_all((self.totals, sums))

    def forget_detail(self) -> None:
        """Frees the detail of the run, because other runs need the memory."""
        self.detail = None
        for report in self.reported_steps.values():
            self._forget_calls(report)

    def forget_oldest_calls(self) -> None:
        """Frees the calls of the oldest step that still has some."""
        self._forget_calls(next(report for _, report in sorted(self.reported_steps.items()) if report.calls))

    def _forget_calls(self, report: StepReport) -> None:
        self.calls_bytes -= sum(map(len, report.calls.values()))
        report.calls = {}

    def ended_steps(self) -> list[telemetry_pb2.Step]:
        """Returns the last ended steps in the order of their numbers."""
        return [report.step for _, report in sorted(self.reported_steps.items()) if report.step is not None]

    @property
    def median_step_s(self) -> float | None:
        """The median duration of the last 50 steps in seconds, None before the first."""
        return median(self._durations_s) if self._durations_s else None
