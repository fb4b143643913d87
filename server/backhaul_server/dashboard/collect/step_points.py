"""The steps of a run in points, of which each stands for one or more consecutive steps."""

from collections.abc import Iterable, Sequence
from math import isfinite, nan
from statistics import median

from backhaul_proto.v1 import telemetry_pb2
from backhaul_server.dashboard.collect.series import LARGEST
from backhaul_server.dashboard.schemas.runs import RunSeries

StepRow = tuple[float, float, float, float, float | None, float]
"""Number, milliseconds, the trainer's peak bytes, moved bytes, loss (NaN or None if unknown) and end of a step."""


def step_row(step: telemetry_pb2.Step) -> tuple[float, float, float, float, float, float]:
    """Returns the `StepRow` of an ended step, with a NaN for an unknown loss."""
    moved_bytes = min(LARGEST, step.up_bytes + step.down_bytes)
    loss = step.loss if step.HasField("loss") else nan
    return step.number, 1e3 * step.duration_s, step.peak_bytes, moved_bytes, loss, step.started_at_s + step.duration_s


def series_of(run: str, groups: Iterable[Sequence[StepRow]], shift_s: float = 0.0) -> RunSeries:
    """Returns the steps of a run with a point for each group: medians of time and loss, and the largest bytes.

    Args:
        run: The id of the run.
        groups: The rows of each point, ordered by number; none is empty.
        shift_s: Seconds to add to times.
    """
    series = RunSeries(run=run, step=[], at_s=[], step_ms=[], peak_bytes=[], moved_bytes=[], loss=[])
    for rows in groups:
        numbers, step_ms, peaks, moved, losses, ended_at_s = zip(*rows, strict=True)
        known = [loss for loss in losses if loss is not None and isfinite(loss)]
        series.step.append(int(numbers[-1]))
        series.at_s.append(ended_at_s[-1] + shift_s)
        series.step_ms.append(median(step_ms))
        series.peak_bytes.append(int(max(peaks)))
        series.moved_bytes.append(int(max(moved)))
        series.loss.append(median(known) if known else None)
    return series
