"""The table of all metrics of /metrics. The Grafana dashboard shows each, and docs/monitoring.md lists them.

Names follow Prometheus' rules: base units, and `_total` for counters. Labels have few values: workers, methods and
tiers, but never sessions, runs or segments.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter
from typing import Literal

from backhaul_proto.v1.telemetry_pb2 import GetTelemetryResponse, RpcTelemetry
from backhaul_runtime.wire.telemetry import BOUNDS_S
from backhaul_server.dashboard.collect.watch import Watch
from backhaul_server.dashboard.schemas.events import KINDS

Kind = Literal["gauge", "counter", "histogram"]

EVERY = 4
BUCKETS_S = BOUNDS_S[::EVERY]
"""Upper bounds of the exported histogram in seconds, from 0.1 ms to 52 s; each is twice the one before."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """Durations of calls.

    Attributes:
        counts: For each bound in BUCKETS_S, the number of calls that took no longer.
        calls: The number of all calls.
        sum_s: The sum of all durations, in seconds.
    """

    counts: tuple[int, ...]
    calls: int
    sum_s: float


Sample = tuple[tuple[str, ...], float | Histogram]
"""The values of the labels, and the measured value."""


@dataclass(frozen=True, slots=True)
class MetricDefinition:
    """A metric.

    Attributes:
        name: The name in queries. That of a histogram lacks `_bucket`, `_sum` and `_count`.
        kind: The Prometheus type; rates can be computed of counters and histograms.
        help: The description of what it measures.
        labels: The names of its labels.
        read: Returns all current samples.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...]
    read: Callable[[Watch], Iterable[Sample]]


_TIERS = {
    "segments": "segment_bytes",
    "cached": "cached_bytes",
    "working": "working_bytes",
    "results": "result_bytes",
}


def _answering(watch: Watch) -> Iterator[tuple[str, GetTelemetryResponse]]:
    """Yields the address and the last answer of each reachable worker. Older answers are no measurement of now."""
    for worker in watch.workers:
        if worker.telemetry is not None and worker.state != "unreachable":
            yield worker.address.text, worker.telemetry


def _worker(name: str, kind: Kind, text: str, value: str | Callable[[GetTelemetryResponse], float]) -> MetricDefinition:
    """Returns a metric with one value per worker: a field of its answer by its path, or a function of the answer."""
    value_of = attrgetter(value) if isinstance(value, str) else value

    def read(watch: Watch) -> Iterator[Sample]:
        return (((worker,), value_of(telemetry)) for worker, telemetry in _answering(watch))

    return MetricDefinition(f"backhaul_worker_{name}", kind, text, ("worker",), read)


def _trainers(name: str, text: str, label: str, **fields: str) -> MetricDefinition:
    """Returns a counter over all trainers. `fields` maps each value of the label to a field of `Totals`."""

    def read(watch: Watch) -> Iterator[Sample]:
        totals = watch.trainers.totals
        return (((kind,), getattr(totals, field)) for kind, field in fields.items())

    return MetricDefinition(f"backhaul_trainer_{name}", "counter", text, (label,), read)


def _trainer(
    name: str, text: str, value: str | Callable[[Watch], float], kind: Literal["gauge", "counter"] = "counter"
) -> MetricDefinition:
    """Returns a metric with one value over all trainers: an attribute of `Trainers` by its path, or a function."""
    value_of = attrgetter(f"trainers.{value}") if isinstance(value, str) else value
    return MetricDefinition(f"backhaul_trainer_{name}", kind, text, (), lambda watch: [((), value_of(watch))])


def _up(watch: Watch) -> Iterator[Sample]:
    return (((worker.address.text,), float(worker.state != "unreachable")) for worker in watch.workers)


def _info(watch: Watch) -> Iterator[Sample]:
    for worker, telemetry in _answering(watch):
        yield (worker, telemetry.worker_version, telemetry.device, _fingerprint(telemetry)), 1.0


def _fingerprint(telemetry: GetTelemetryResponse) -> str:
    """Returns a short hash of a worker's fingerprint; empty if the worker has reported none."""
    lines = "\n".join(f"{key}={value}" for key, value in sorted(telemetry.fingerprint.items()))
    return hashlib.sha256(lines.encode()).hexdigest()[:8] if lines else ""


def _mixed_runs(watch: Watch) -> int:
    """Returns the number of runs whose workers differ in their fingerprints."""
    seen: dict[str, set[str]] = {}
    for _, telemetry in _answering(watch):
        for session in telemetry.sessions:
            if session.run:
                seen.setdefault(session.run, set()).add(_fingerprint(telemetry))
    return sum(len(fingerprints) > 1 for fingerprints in seen.values())


def _memory(watch: Watch) -> Iterator[Sample]:
    for worker, telemetry in _answering(watch):
        for tier, field in _TIERS.items():
            yield (worker, tier), getattr(telemetry.memory, field)


def _durations(watch: Watch) -> Iterator[Sample]:
    for worker, telemetry in _answering(watch):
        for rpc in telemetry.rpcs:
            yield (worker, rpc.method), histogram(rpc)


def _errors(watch: Watch) -> Iterator[Sample]:
    for worker, telemetry in _answering(watch):
        for rpc in telemetry.rpcs:
            yield (worker, rpc.method), rpc.errors


def _utilization(watch: Watch) -> Iterator[Sample]:
    for worker, telemetry in _answering(watch):
        accelerator = telemetry.accelerator
        if accelerator.HasField("utilization"):
            yield (worker, accelerator.name), accelerator.utilization


def _accelerator_memory(watch: Watch) -> Iterator[Sample]:
    for worker, telemetry in _answering(watch):
        if telemetry.HasField("accelerator"):
            yield (worker, telemetry.accelerator.name, "used"), telemetry.accelerator.used_bytes
            yield (worker, telemetry.accelerator.name, "total"), telemetry.accelerator.total_bytes


def _events(watch: Watch) -> Iterator[Sample]:
    return (((kind,), watch.events.counts[kind]) for kind in KINDS)


def _skewed(telemetry: GetTelemetryResponse) -> int:
    return sum(session.client_version not in {"", telemetry.worker_version} for session in telemetry.sessions)


def histogram(rpc: RpcTelemetry) -> Histogram:
    """Merges a worker's buckets into BUCKETS_S. Of a worker with other buckets only the sums are exported."""
    if len(rpc.buckets) != len(BOUNDS_S) + 1:
        return Histogram((0,) * len(BUCKETS_S), rpc.calls, rpc.total_s)
    reached = tuple(accumulate(rpc.buckets))
    return Histogram(reached[: len(BOUNDS_S) : EVERY], reached[-1], rpc.total_s)


_HELD = (
    "Bytes charged against a worker's budget, by tier: tensors that live segments name, tensors cached for the next "
    "step, replays, and finished results"
)
_LANES = (
    "Seconds that segments spent in each phase. Phases overlap. forward counts only segments that a worker recomputed; "
    "queue includes speculative replays, whose waiting costs nothing; wait is the time for which backward was blocked"
)

METRICS: tuple[MetricDefinition, ...] = (
    MetricDefinition("backhaul_worker_up", "gauge", "1 if a worker answers, 0 if it does not", ("worker",), _up),
    MetricDefinition(
        "backhaul_worker_info",
        "gauge",
        "Always 1. The labels give a worker's version, device and fingerprint; equal fingerprints compute equal bits",
        ("worker", "version", "device", "fingerprint"),
        _info,
    ),
    _worker("draining", "gauge", "1 while a worker is shutting down and accepts no new work", "draining"),
    _worker("uptime_seconds", "gauge", "Seconds since a worker started", "uptime_s"),
    MetricDefinition("backhaul_worker_memory_bytes", "gauge", _HELD, ("worker", "tier"), _memory),
    _worker("memory_budget_bytes", "gauge", "Bytes that all tiers together may take", "memory.budget_bytes"),
    _worker(
        "memory_reserve_bytes",
        "gauge",
        "Bytes that a worker's GPU takes beside all tiers, and by which they may take less than the budget",
        "memory.reserve_bytes",
    ),
    _worker("resident_memory_bytes", "gauge", "Resident memory of a worker's process", "memory.resident_bytes"),
    _worker(
        "refusals_total",
        "counter",
        "Requests refused because memory was short; their segments run on the trainer",
        "memory.refusals",
    ),
    _worker(
        "evictions_total",
        "counter",
        "Cached tensors, speculative replays and results evicted because memory was short",
        "memory.evictions",
    ),
    _worker("sessions", "gauge", "Open sessions of trainers", lambda telemetry: len(telemetry.sessions)),
    _worker("skewed_sessions", "gauge", "Sessions of trainers whose version of Backhaul is not the worker's", _skewed),
    _worker(
        "segments",
        "gauge",
        "Segments that wait for their backward",
        lambda telemetry: sum(session.segments for session in telemetry.sessions),
    ),
    _worker(
        "drift_ratio",
        "gauge",
        "Largest relative difference between the numbers of a worker and a trainer; 0 if equal",
        lambda telemetry: max((session.drift for session in telemetry.sessions), default=0.0),
    ),
    _worker("queued_requests", "gauge", "Requests that wait or run", "queued_requests"),
    _worker(
        "recomputed_segments_total",
        "counter",
        "Replays that have run, including speculative ones",
        "recomputed_segments",
    ),
    _worker("busy_seconds_total", "counter", "Seconds that a worker has computed since it started", "busy_s"),
    _worker("received_bytes_total", "counter", "Bytes of received messages", "received_bytes"),
    _worker("sent_bytes_total", "counter", "Bytes of sent messages", "sent_bytes"),
    _worker(
        "spared_bytes_total",
        "counter",
        "Bytes of tensors that trainers did not send, because they sent differences from earlier ones",
        "spared_bytes",
    ),
    MetricDefinition(
        "backhaul_worker_accelerator_utilization_ratio",
        "gauge",
        "Share of the last moments in which a kernel ran on a worker's GPU, from 0 to 1; needs the extra nvml",
        ("worker", "accelerator"),
        _utilization,
    ),
    MetricDefinition(
        "backhaul_worker_accelerator_memory_bytes",
        "gauge",
        "Memory of a worker's GPU: used by all processes, and in all; needs the extra nvml",
        ("worker", "accelerator", "kind"),
        _accelerator_memory,
    ),
    MetricDefinition(
        "backhaul_rpc_duration_seconds",
        "histogram",
        "Durations of calls on a worker, including transfers",
        ("worker", "method"),
        _durations,
    ),
    MetricDefinition("backhaul_rpc_errors_total", "counter", "Calls that failed", ("worker", "method"), _errors),
    _trainer("runs", "Trainers that have reported recently", "running", "gauge"),
    _trainer("mixed_runs", "Trainers whose workers differ in their fingerprints", _mixed_runs, "gauge"),
    _trainer("steps_total", "Steps of all trainers", "totals.steps"),
    _trainers(
        "recomputations_total",
        "Recomputed segments: on a worker that returned gradients or activations, or on the trainer",
        "decision",
        gradients="gradients",
        activations="activations",
        trainer="on_trainer",
    ),
    _trainer("fallbacks_total", "Segments that were meant for a worker but ran on the trainer", "totals.fallbacks"),
    _trainer("retries_total", "Requests that trainers repeated", "totals.retries"),
    _trainer("mismatches_total", "Recomputations whose values a trainer rejected", "totals.mismatches"),
    _trainers(
        "lane_seconds_total",
        _LANES,
        "lane",
        forward="remote_forward_s",
        upload="upload_s",
        queue="queue_s",
        recompute="recompute_s",
        backward="backward_s",
        download="download_s",
        wait="wait_s",
    ),
    _trainer(
        "exposed_queue_seconds_total",
        "Seconds for which backward was blocked by a segment in a worker's queue",
        "totals.exposed_queue_s",
    ),
    _trainer(
        "overhead_seconds_total",
        "Seconds of recording, digests and sending in the trainers' own threads",
        "totals.overhead_s",
    ),
    _trainer(
        "spared_seconds_total",
        "Seconds that trainers would have needed for the recomputations and backwards that workers did",
        "totals.spared_s",
    ),
    _trainers(
        "transferred_bytes_total",
        "Bytes of tensors sent to workers and received from them",
        "direction",
        up="up_bytes",
        down="down_bytes",
    ),
    _trainer(
        "spared_bytes_total",
        "Bytes of parameters that trainers did not send, because they sent differences from earlier ones",
        "totals.spared_bytes",
    ),
    _trainer(
        "saved_bytes",
        "Bytes that running trainers save because workers recompute, as of the end of their last step",
        "saved_bytes",
        "gauge",
    ),
    _trainer(
        "dropped_reports_total",
        "Steps and calls that were not reported or not kept because queues were full",
        "dropped",
    ),
    MetricDefinition(
        "backhaul_events_total",
        "counter",
        "Events since the dashboard started: what trainers reported, and what the dashboard saw itself",
        ("kind",),
        _events,
    ),
)
