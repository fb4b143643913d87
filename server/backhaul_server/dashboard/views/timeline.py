"""The last steps of a run as bars in lanes."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from backhaul_proto.v1 import telemetry_pb2
from backhaul_server.dashboard.collect.intervals import Interval, common, length, rows_of, union
from backhaul_server.dashboard.collect.links import Alignment
from backhaul_server.dashboard.collect.series import LARGEST
from backhaul_server.dashboard.collect.training_runs import TrainerRun
from backhaul_server.dashboard.schemas.timeline import (
    BlockShare,
    BlockStatus,
    Call,
    Lane,
    Span,
    Timeline,
    TimelineClock,
    TimelineRun,
    TimelineStep,
)
from backhaul_server.dashboard.views.missing_details import why_missing
from backhaul_server.dashboard.views.ranges import EVER, TimeRange

BARS = 20_000
"""The number of bars in an export. If there are more, the shortest are left out."""
SHOWN_BARS = 4_000
"""The number of bars on the page. Further bars would be thinner than a pixel and take seconds to send."""
LANES: dict[int, Lane] = {
    telemetry_pb2.LANE_FORWARD: "forward",
    telemetry_pb2.LANE_UPLOAD: "upload",
    telemetry_pb2.LANE_QUEUE: "queue",
    telemetry_pb2.LANE_RECOMPUTE: "recompute",
    telemetry_pb2.LANE_BACKWARD: "backward",
    telemetry_pb2.LANE_DOWNLOAD: "download",
    telemetry_pb2.LANE_WAIT: "wait",
    telemetry_pb2.LANE_TRAINER: "trainer",
}
OF_TRAINER = frozenset({"forward", "wait", "trainer"})
_REMOTE = frozenset(LANES.values()) - OF_TRAINER
_GRID = 1_024
"""Parts of a millisecond at which bars start and end. Their sums are exact, so adjacent bars do not overlap."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A span of a call, clipped to the shown steps.

    Attributes:
        lane: The phase that the bar shows.
        worker: Address of the worker; empty for the trainer.
        start_s: Start by the trainer's clock, in seconds since 1970.
        end_s: End by the same clock.
        call: Index of its call in `Steps.calls`.
    """

    lane: Lane
    worker: str
    start_s: float
    end_s: float
    call: int


@dataclass(frozen=True)
class Steps:
    """The last ended steps of a run.

    All times are on the axis of the trainer's clock, plus `shift_s`.

    Attributes:
        run: The run that they belong to.
        steps: The steps, ordered by number.
        calls: The segment calls of these steps.
        bars: The bars of these calls, ordered by their start.
        left_out: Number of bars that were left out because there were too many.
        begin_s: Start of the first step, in seconds since 1970.
        end_s: The end of the last step, in seconds since 1970.
        shift_s: Seconds to add to each of these times for the axis of the dashboard's clock.
    """

    run: TrainerRun
    steps: list[telemetry_pb2.Step]
    calls: list[telemetry_pb2.SegmentCall]
    bars: list[Bar]
    left_out: int
    begin_s: float
    end_s: float
    shift_s: float = 0.0


def last_steps(
    run: TrainerRun, count: int, most_bars: int = BARS, within: TimeRange = EVER, shift_s: float = 0.0
) -> Steps:
    """Returns the last `count` ended steps that are known, with the longest of their bars.

    Args:
        run: The run whose steps are shown.
        count: The largest number of steps.
        most_bars: The largest number of bars.
        within: The range in which a step must end, by the dashboard's clock.
        shift_s: Seconds to add to a time of the trainer's clock for the dashboard's.
    """
    steps = [
        step
        for step in run.ended_steps()
        if within.since_s <= step.started_at_s + step.duration_s + shift_s <= within.until_s
    ][-count:]
    begin_s = min((step.started_at_s for step in steps), default=0.0)
    end_s = max((step.started_at_s + step.duration_s for step in steps), default=0.0)
    calls: list[telemetry_pb2.SegmentCall] = []
    bars: list[Bar] = []
    for step in steps:
        for _, packed in sorted(run.reported_steps[step.number].calls.items()):
            call = telemetry_pb2.SegmentCall.FromString(packed)
            bars += _bars(call, len(calls), begin_s, end_s)
            calls.append(call)
    bars.sort(key=lambda bar: bar.start_s - bar.end_s)
    left_out = max(0, len(bars) - most_bars)
    bars = sorted(bars[:most_bars], key=lambda bar: bar.start_s)
    return Steps(run, steps, calls, bars, left_out, begin_s, end_s, shift_s)


def _bars(call: telemetry_pb2.SegmentCall, index: int, begin_s: float, end_s: float) -> list[Bar]:
    bars = []
    for span in call.spans:
        lane = LANES[span.lane]
        start_s, stop_s = max(begin_s, span.started_at_s), min(end_s, span.started_at_s + span.duration_s)
        if start_s <= stop_s:
            bars.append(Bar(lane, "" if lane in OF_TRAINER else call.worker, start_s, stop_s, index))
    return bars


def name_of(call: telemetry_pb2.SegmentCall) -> str:
    """Returns the name of a call's segment as the table of segments shows it."""
    return f"{call.name} #{call.position}"


def timeline(
    runs: Sequence[tuple[TrainerRun, Alignment | None]], count: int, within: TimeRange = EVER, forgotten: int = 0
) -> Timeline:
    """Returns the timeline of the last steps of runs, on one axis.

    Args:
        runs: The runs, each with the comparison of its trainer's clock with ours; None if they cannot be compared.
        count: The largest number of steps of each run.
        within: The range in which steps must end.
        forgotten: The number of further runs that were asked for, of which only the history knows.
    """
    most_bars = SHOWN_BARS // max(1, len(runs))
    parts = [
        last_steps(run, count, most_bars, within, aligned.shift_s if aligned is not None else 0.0)
        for run, aligned in runs
    ]
    ended = [part for part in parts if part.steps]
    begin_s = min((part.begin_s + part.shift_s for part in ended), default=0.0)
    end_s = max((part.end_s + part.shift_s for part in ended), default=0.0)
    shown = Timeline(
        run=runs[0][0].id if runs else "",
        begins_at_s=begin_s,
        duration_ms=1e3 * (end_s - begin_s),
        steps=[],
        runs=[TimelineRun.of(run.about, aligned, run=run.id) for run, aligned in runs],
        workers=[clock for run, _ in runs for clock in _clocks(run)],
        why_empty="",
        note=why_missing("Timelines", [*(run for run, _ in runs), *[None] * forgotten]),
        spans=[],
        calls=[],
        left_out=sum(part.left_out for part in parts),
    )
    for part in ended:
        _add(shown, part, begin_s - part.shift_s)
    if not shown.spans:
        known = [run for run, _ in runs]
        has_details = any(run.detail is not None for run in known)
        if shown.note and not has_details:
            shown.why_empty = shown.note
        else:
            shown.why_empty = _why_empty(known, has_steps=bool(ended), is_ever=within == EVER)
        shown.note = ""
    return shown


def _add(shown: Timeline, part: Steps, begin_s: float) -> None:
    """Adds the steps of a run to a timeline that begins at `begin_s` of the trainer's clock."""
    bars: dict[int, list[Bar]] = defaultdict(list)
    for bar in part.bars:
        bars[part.calls[bar.call].step].append(bar)
    first = len(shown.calls)
    place_of = {call: first + index for index, call in enumerate(sorted({bar.call for bar in part.bars}))}
    shown.steps += [_step(part.run.id, step, begin_s, bars[step.number]) for step in part.steps]
    shown.spans += _spans(part, begin_s, place_of)
    calls = [part.calls[call] for call in place_of]
    shown.calls += [
        Call.of(call, call.capture, run=part.run.id, segment=name_of(call), recorded_because=call.capture.reason)
        for call in calls
    ]


def _clocks(run: TrainerRun) -> list[TimelineClock]:
    clocks = []
    for address in sorted({*run.about.workers, *run.links}):
        link = run.links.get(address)
        clocks.append(TimelineClock.of(link.clock if link is not None else None, run=run.id, worker=address))
    return clocks


def _why_empty(runs: Sequence[TrainerRun], *, has_steps: bool, is_ever: bool) -> str:
    """Returns a sentence that says why a timeline has no bars, and what to do."""
    if not runs:
        return "No trainer has reported yet. Train with a session on one of the watched workers, with telemetry on."
    if not has_steps:
        if not is_ever and any(run.ended_steps() for run in runs):
            return "No known step ended in this range of time. Choose another range: only the last 64 steps are kept."
        return "No step has ended yet. A step ends when the optimizer steps, or when session.step() is called."
    if not any(step.calls for run in runs for step in run.ended_steps()):
        return "These steps had no checkpointed calls."
    return "The calls of these steps were not reported or are kept no longer. Choose a later step."


def by_lane(bars: Sequence[Bar]) -> dict[tuple[Lane, str], list[Bar]]:
    """Groups bars by lane and worker, in the order of their starts."""
    grouped: dict[tuple[Lane, str], list[Bar]] = defaultdict(list)
    for bar in bars:
        grouped[bar.lane, bar.worker].append(bar)
    return grouped


def _spans(steps: Steps, begin_s: float, place_of: Mapping[int, int]) -> list[Span]:
    spans, names = [], [name_of(call) for call in steps.calls]
    for (lane, worker), bars in by_lane(steps.bars).items():
        placed = [(_on_grid(bar.start_s - begin_s), _on_grid(bar.end_s - begin_s)) for bar in bars]
        for bar, (start_ms, end_ms), row in zip(bars, placed, rows_of(placed), strict=True):
            spans.append(
                Span(
                    lane=lane,
                    worker=worker,
                    row=row,
                    start_ms=start_ms,
                    duration_ms=end_ms - start_ms,
                    segment=names[bar.call],
                    run=steps.run.id,
                    call=place_of[bar.call],
                )
            )
    return spans


def _on_grid(seconds: float) -> float:
    """Converts seconds to milliseconds that lie on the grid."""
    return round(1e3 * _GRID * seconds) / _GRID


def _step(run: str, step: telemetry_pb2.Step, begin_s: float, bars: Sequence[Bar]) -> TimelineStep:
    return TimelineStep.of(
        step,
        run=run,
        start_ms=1e3 * (step.started_at_s - begin_s),
        overlap=_overlap(bars),
        block=_block(step.block) if step.HasField("block") else None,
    )


def _block(block: telemetry_pb2.Block) -> BlockStatus:
    segments = sum(share.segments for share in block.shares)
    trainer_s = next((share.segment_s for share in block.shares if not share.worker and share.segments), 0.0)
    alone_s = block.others_s + segments * trainer_s
    return BlockStatus.of(
        block,
        speed_up=min(LARGEST, alone_s / block.took_s) if trainer_s and block.took_s else None,
        shares=[
            BlockShare.of(
                share,
                share=share.segments / segments if segments else 0.0,
                speed=min(LARGEST, trainer_s / share.segment_s) if trainer_s and share.segment_s else None,
            )
            for share in block.shares
        ],
    )


def _overlap(bars: Sequence[Bar]) -> float | None:
    """Returns the share of the time of remote work during which backward was not blocked; None without remote work."""
    remote = union(_interval(bar) for bar in bars if bar.lane in _REMOTE)
    waiting = union(_interval(bar) for bar in bars if bar.lane == "wait")
    worked_s = length(remote)
    return 1 - common(remote, waiting) / worked_s if worked_s else None


def _interval(bar: Bar) -> Interval:
    return bar.start_s, bar.end_s
