"""Durations of RPCs as workers measure them, and phases of segments as trainers measure them."""

from collections.abc import Iterable

from backhaul_runtime.wire.telemetry import BOUNDS_S
from backhaul_server.dashboard.collect.durations import Counted, Tally
from backhaul_server.dashboard.collect.training_runs import TrainerRun
from backhaul_server.dashboard.schemas.latency import Heat, Latency, Phases, Rpc
from backhaul_server.dashboard.views.ranges import EVER, TimeRange
from backhaul_server.dashboard.views.timeline import LANES

_COLUMNS = 100
_MERGED = 4  # buckets per row of the heat map; the upper bound of each row is twice that of the row before
_OWN_METHOD = "GetTelemetry"


def latency(
    calls: Tally, runs: Iterable[tuple[TrainerRun, float]], shown: TimeRange, method: str, of_steps: TimeRange = EVER
) -> Latency:
    """Returns the latency over a range, and the phases of the known steps that began in `of_steps`.

    Each run comes with the seconds to add to times of its trainer's clock for the dashboard's. The heat map covers one
    method, or all methods except the dashboard's own polls.
    """
    counts = calls.counted(shown.since_s, shown.until_s)
    return Latency(
        window_s=shown.until_s - shown.since_s,
        rpcs=[_rpc(name, counted) for name, counted in sorted(counts.items()) if counted.calls or counted.errors],
        heat=_heat(calls, shown, method),
        phases=[_phases(run, shift_s, of_steps) for run, shift_s in runs],
    )


def _rpc(method: str, counted: Counted) -> Rpc:
    p50_ms, p90_ms, p99_ms = (
        None if (seconds := counted.percentile(share)) is None else round(1e3 * seconds, 3)
        for share in (0.5, 0.9, 0.99)
    )
    return Rpc(method=method, calls=counted.calls, errors=counted.errors, p50_ms=p50_ms, p90_ms=p90_ms, p99_ms=p99_ms)


def _heat(calls: Tally, shown: TimeRange, method: str) -> Heat:
    interval_s = shown.interval_s(_COLUMNS)
    first = int(shown.since_s // interval_s) + 1  # columns keep their times from one request to the next
    columns = max(1, int(shown.until_s // interval_s) - first + 1)
    bounds_s = BOUNDS_S[_MERGED - 1 :: _MERGED]
    counts = [[0] * (len(bounds_s) + 1) for _ in range(columns)]
    row_of = [bucket // _MERGED for bucket in range(len(BOUNDS_S) + 1)]
    calls.fill(
        counts,
        lambda second: max(0, min(columns - 1, second // interval_s - first)),
        row_of,
        first * interval_s,
        shown.until_s,
        lambda name: name == method if method else name != _OWN_METHOD,
    )
    return Heat(
        at_s=[float((first + column) * interval_s) for column in range(columns)],
        interval_s=interval_s,
        bounds_ms=[round(1e3 * bound, 4) for bound in bounds_s],
        counts=counts,
    )


def _phases(run: TrainerRun, shift_s: float, of_steps: TimeRange) -> Phases:
    steps = [
        (number, report.step.started_at_s + shift_s, report.lanes_s)
        for number, report in sorted(run.reported_steps.items())
        if report.step is not None and of_steps.since_s <= report.step.started_at_s + shift_s <= of_steps.until_s
    ]

    columns = {
        f"{name}_ms": [round(1e3 * lanes_s[lane], 3) for _, _, lanes_s in steps]
        for lane, name in LANES.items()
        if f"{name}_ms" in Phases.model_fields
    }
    return Phases(run=run.id, step=[number for number, _, _ in steps], at_s=[at_s for _, at_s, _ in steps], **columns)
