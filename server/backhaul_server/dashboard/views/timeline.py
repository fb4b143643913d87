"""The last steps of a run as lanes of bars."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from backhaul_proto.v1 import telemetry_pb2
from backhaul_server.dashboard.collect.intervals import Interval, common, length, rows_of, union
from backhaul_server.dashboard.collect.runs import TrainerRun
from backhaul_server.dashboard.collect.series import LARGEST
from backhaul_server.dashboard.views import schemas

BARS = 20_000
"""The number of bars in an export. If there are more, the shortest are left out."""
SHOWN_BARS = 4_000
"""The number of bars on the page. Further bars would be thinner than a pixel and take seconds to send."""
LANES: dict[int, schemas.Lane] = {
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

    lane: schemas.Lane
    worker: str
    start_s: float
    end_s: float
    call: int


@dataclass(frozen=True)
class Steps:
    """The last ended steps of a run.

    Attributes:
        run: The run that they belong to.
        steps: The steps, ordered by number.
        calls: The segment calls of these steps.
        bars: The bars of these calls, ordered by their start.
        left_out: Number of bars that were left out because there were too many.
        begin_s: Start of the first step, in seconds since 1970.
        end_s: The end of the last step, in seconds since 1970.
    """

    run: TrainerRun
    steps: list[telemetry_pb2.Step]
    calls: list[telemetry_pb2.SegmentCall]
    bars: list[Bar]
    left_out: int
    begin_s: float
    end_s: float


def last_steps(run: TrainerRun, count: int, most_bars: int = BARS) -> Steps:
    """Returns the last `count` ended steps that are known, with the longest of their bars."""
    steps = run.ended_steps()[-count:]
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
    return Steps(run, steps, calls, bars, left_out, begin_s, end_s)


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


def timeline(run: TrainerRun | None, count: int) -> schemas.Timeline:
    """Returns the timeline of the last steps. It is empty without a run."""
    if run is None:
        return schemas.Timeline(run="", begins_at_s=0, duration_ms=0, steps=[], spans=[], calls=[], left_out=0)
    shown_steps = last_steps(run, count, SHOWN_BARS)
    bars: dict[int, list[Bar]] = defaultdict(list)
    for bar in shown_steps.bars:
        bars[shown_steps.calls[bar.call].step].append(bar)
    shown = {call: index for index, call in enumerate(sorted({bar.call for bar in shown_steps.bars}))}
    return schemas.Timeline(
        run=run.id,
        begins_at_s=shown_steps.begin_s,
        duration_ms=1e3 * (shown_steps.end_s - shown_steps.begin_s),
        steps=[_step(step, shown_steps.begin_s, bars[step.number]) for step in shown_steps.steps],
        spans=_spans(shown_steps, shown),
        calls=[_call(shown_steps.calls[call]) for call in shown],
        left_out=shown_steps.left_out,
    )


def by_lane(bars: Sequence[Bar]) -> dict[tuple[schemas.Lane, str], list[Bar]]:
    """Groups bars by lane and worker, in the order of their starts."""
    lanes: dict[tuple[schemas.Lane, str], list[Bar]] = defaultdict(list)
    for bar in bars:
        lanes[bar.lane, bar.worker].append(bar)
    return lanes


def _spans(steps: Steps, shown: Mapping[int, int]) -> list[schemas.Span]:
    spans, names = [], [name_of(call) for call in steps.calls]
    for (lane, worker), bars in by_lane(steps.bars).items():
        placed = [(_on_grid(bar.start_s - steps.begin_s), _on_grid(bar.end_s - steps.begin_s)) for bar in bars]
        for bar, (start_ms, end_ms), row in zip(bars, placed, rows_of(placed), strict=True):
            spans.append(
                schemas.Span(
                    lane=lane,
                    worker=worker,
                    row=row,
                    start_ms=start_ms,
                    duration_ms=end_ms - start_ms,
                    segment=names[bar.call],
                    call=shown[bar.call],
                )
            )
    return spans


def _on_grid(seconds: float) -> float:
    """Converts seconds to milliseconds that lie on the grid."""
    return round(1e3 * _GRID * seconds) / _GRID


def _step(step: telemetry_pb2.Step, begin_s: float, bars: Sequence[Bar]) -> schemas.TimelineStep:
    return schemas.TimelineStep(
        number=step.number,
        start_ms=1e3 * (step.started_at_s - begin_s),
        duration_ms=1e3 * step.duration_s,
        loss=step.loss if step.HasField("loss") else None,
        overlap=_overlap(bars),
        wait_ms=1e3 * step.wait_s,
        block=_block(step.block) if step.HasField("block") else None,
    )


def _block(block: telemetry_pb2.Block) -> schemas.BlockStatus:
    segments = sum(share.segments for share in block.shares)
    trainer_s = next((share.segment_s for share in block.shares if not share.worker and share.segments), 0.0)
    alone_s = block.others_s + segments * trainer_s
    return schemas.BlockStatus(
        micro_batches=block.micro_batches,
        took_ms=1e3 * block.took_s,
        held_bytes=block.held_bytes,
        speed_up=min(LARGEST, alone_s / block.took_s) if trainer_s and block.took_s else None,
        shares=[
            schemas.BlockShare(
                worker=share.worker,
                segments=share.segments,
                share=share.segments / segments if segments else 0.0,
                segment_ms=1e3 * share.segment_s,
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


def _call(call: telemetry_pb2.SegmentCall) -> schemas.Call:
    return schemas.Call(
        step=call.step,
        segment=name_of(call),
        worker=call.worker,
        decision=cast(schemas.Decision, call.decision),
        reason=call.reason,
        is_fallback=call.is_fallback,
        up_bytes=call.up_bytes,
        down_bytes=call.down_bytes,
        retries=call.retries,
        mismatches=call.mismatches,
        drift=call.drift,
        overhead_ms=1e3 * call.overhead_s,
        micro_batch=call.micro_batch,
    )
