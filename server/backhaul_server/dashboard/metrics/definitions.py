"""Every metric, once. /metrics, the Grafana dashboard and the page of docs are made from this table.

Named by Prometheus' rules: base units, `_total` for counters, and labels only of what there are few: workers, methods,
tiers. Never sessions, runs or segments.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from backhaul_proto.v1.telemetry_pb2 import GetTelemetryResponse, RpcTelemetry
from backhaul_runtime.wire.telemetry import BOUNDS_S
from backhaul_server.dashboard.collect.totals import Totals
from backhaul_server.dashboard.collect.watch import Watch

Kind = Literal["gauge", "counter", "histogram"]

EVERY = 4
BUCKETS_S = BOUNDS_S[::EVERY]
"""Upper bounds of the histogram that is exported, each twice the one before: of 0.1 ms to 52 s."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """Durations of calls.

    Attributes:
        counts: How many took no longer than each of BUCKETS_S.
        calls: The number of all calls.
        sum_s: What they took together.
    """

    counts: tuple[int, ...]
    calls: int
    sum_s: float


Sample = tuple[tuple[str, ...], float | Histogram]
"""Values of the labels, and what was measured."""


@dataclass(frozen=True, slots=True)
class MetricDefinition:
    """A metric.

    Attributes:
        name: As queries name it, but a histogram's without `_bucket`, `_sum` and `_count`.
        kind: What may be done with it: rates are of counters.
        help: The description of what it measures.
        labels: Names of its labels.
        read: All its samples now.
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


def _answering(source: Watch) -> Iterator[tuple[str, GetTelemetryResponse]]:
    """Workers that answer: what another said long ago is no measurement."""
    for worker in source.workers:
        if worker.telemetry is not None and worker.state != "unreachable":
            yield worker.address.text, worker.telemetry


def _worker(name: str, kind: Kind, text: str, value: Callable[[GetTelemetryResponse], float]) -> MetricDefinition:
    """A metric with one value of each worker."""

    def read(source: Watch) -> Iterator[Sample]:
        return (((worker,), value(telemetry)) for worker, telemetry in _answering(source))

    return MetricDefinition(name, kind, text, ("worker",), read)


def _trainers(
    name: str, text: str, values: Callable[[Totals], Sequence[tuple[str, float]]], label: str
) -> MetricDefinition:
    """A counter of all trainers together, by a label."""

    def read(source: Watch) -> Iterator[Sample]:
        return (((kind,), value) for kind, value in values(source.trainers.totals))

    return MetricDefinition(name, "counter", text, (label,), read)


def _trainer(
    name: str, text: str, value: Callable[[Watch], float], kind: Literal["gauge", "counter"] = "counter"
) -> MetricDefinition:
    """A metric with one value of all trainers together."""
    return MetricDefinition(name, kind, text, (), lambda source: [((), value(source))])


def _up(source: Watch) -> Iterator[Sample]:
    return (((worker.address.text,), float(worker.state != "unreachable")) for worker in source.workers)


def _info(source: Watch) -> Iterator[Sample]:
    for worker, telemetry in _answering(source):
        yield (worker, telemetry.worker_version, telemetry.device, _fingerprint(telemetry)), 1.0


def _fingerprint(telemetry: GetTelemetryResponse) -> str:
    """Short, and another one where anything differs; empty where the worker tells none."""
    lines = "\n".join(f"{key}={value}" for key, value in sorted(telemetry.fingerprint.items()))
    return hashlib.sha256(lines.encode()).hexdigest()[:8] if lines else ""


def _mixed_runs(source: Watch) -> int:
    """Runs whose workers differ in fingerprint."""
    seen: dict[str, set[str]] = {}
    for _, telemetry in _answering(source):
        for session in telemetry.sessions:
            if session.run:
                seen.setdefault(session.run, set()).add(_fingerprint(telemetry))
    return sum(len(fingerprints) > 1 for fingerprints in seen.values())


def _memory(source: Watch) -> Iterator[Sample]:
    for worker, telemetry in _answering(source):
        for tier, field in _TIERS.items():
            yield (worker, tier), getattr(telemetry.memory, field)


def _durations(source: Watch) -> Iterator[Sample]:
    for worker, telemetry in _answering(source):
        for rpc in telemetry.rpcs:
            yield (worker, rpc.method), histogram(rpc)


def _errors(source: Watch) -> Iterator[Sample]:
    for worker, telemetry in _answering(source):
        for rpc in telemetry.rpcs:
            yield (worker, rpc.method), rpc.errors


def histogram(rpc: RpcTelemetry) -> Histogram:
    """A worker's buckets by fewer bounds. A worker that counts in others has only the sum of all."""
    if len(rpc.buckets) != len(BOUNDS_S) + 1:
        return Histogram((0,) * len(BUCKETS_S), rpc.calls, rpc.total_s)
    reached = tuple(accumulate(rpc.buckets))
    return Histogram(reached[: len(BOUNDS_S) : EVERY], reached[-1], rpc.total_s)


METRICS: tuple[MetricDefinition, ...] = (
    MetricDefinition("backhaul_worker_up", "gauge", "1 while a worker answers, 0 while it does not", ("worker",), _up),
    MetricDefinition(
        "backhaul_worker_info",
        "gauge",
        "Always 1: what a worker runs, and on what; equal fingerprints compute equal bits",
        ("worker", "version", "device", "fingerprint"),
        _info,
    ),
    _worker(
        "backhaul_worker_draining", "gauge", "1 while a worker takes nothing new", lambda telemetry: telemetry.draining
    ),
    _worker("backhaul_worker_uptime_seconds", "gauge", "Since a worker started", lambda telemetry: telemetry.uptime_s),
    MetricDefinition(
        "backhaul_worker_memory_bytes",
        "gauge",
        "Charged against a worker's budget: tensors that live segments name, parameters cached for the next step, "
        "replays at work, finished results",
        ("worker", "tier"),
        _memory,
    ),
    _worker(
        "backhaul_worker_memory_budget_bytes",
        "gauge",
        "What all tiers together may take",
        lambda telemetry: telemetry.memory.budget_bytes,
    ),
    _worker(
        "backhaul_worker_resident_memory_bytes",
        "gauge",
        "Of a worker's process, as its kernel counts it",
        lambda telemetry: telemetry.memory.resident_bytes,
    ),
    _worker(
        "backhaul_worker_refusals_total",
        "counter",
        "Requests turned away for want of room: their segments run on the trainer",
        lambda telemetry: telemetry.memory.refusals,
    ),
    _worker(
        "backhaul_worker_evictions_total",
        "counter",
        "Cached tensors, replays ahead and results given up for want of room",
        lambda telemetry: telemetry.memory.evictions,
    ),
    _worker(
        "backhaul_worker_sessions", "gauge", "Open sessions of trainers", lambda telemetry: len(telemetry.sessions)
    ),
    _worker(
        "backhaul_worker_skewed_sessions",
        "gauge",
        "Sessions of trainers with another version of Backhaul than the worker's",
        lambda telemetry: sum(
            session.client_version not in {"", telemetry.worker_version} for session in telemetry.sessions
        ),
    ),
    _worker(
        "backhaul_worker_segments",
        "gauge",
        "Segments held for a backward to come",
        lambda telemetry: sum(session.segments for session in telemetry.sessions),
    ),
    _worker(
        "backhaul_worker_drift_ratio",
        "gauge",
        "Largest relative difference between a worker's numbers and a trainer's, 0 where all bits are equal",
        lambda telemetry: max((session.drift for session in telemetry.sessions), default=0.0),
    ),
    _worker(
        "backhaul_worker_queued_requests",
        "gauge",
        "Requests that wait or run",
        lambda telemetry: telemetry.queued_requests,
    ),
    _worker(
        "backhaul_worker_recomputed_segments_total",
        "counter",
        "Replays that ran, those ahead of their request included",
        lambda telemetry: telemetry.recomputed_segments,
    ),
    _worker(
        "backhaul_worker_received_bytes_total", "counter", "Of messages", lambda telemetry: telemetry.received_bytes
    ),
    _worker("backhaul_worker_sent_bytes_total", "counter", "Of messages", lambda telemetry: telemetry.sent_bytes),
    MetricDefinition(
        "backhaul_rpc_duration_seconds",
        "histogram",
        "Calls as a worker serves them, transfers included",
        ("worker", "method"),
        _durations,
    ),
    MetricDefinition("backhaul_rpc_errors_total", "counter", "Calls that failed", ("worker", "method"), _errors),
    _trainer(
        "backhaul_trainer_runs", "Trainers that were heard of a moment ago", lambda s: s.trainers.running, "gauge"
    ),
    _trainer(
        "backhaul_trainer_mixed_runs",
        "Trainers whose workers have different fingerprints, and so compute different numbers",
        _mixed_runs,
        "gauge",
    ),
    _trainer("backhaul_trainer_steps_total", "Steps of all trainers", lambda s: s.trainers.totals.steps),
    _trainers(
        "backhaul_trainer_recomputations_total",
        "Segments recomputed, by who did it: a worker that gave gradients or activations, or the trainer",
        lambda sums: [
            ("gradients", sums.gradients),
            ("activations", sums.activations),
            ("trainer", sums.on_trainer),
        ],
        "decision",
    ),
    _trainer(
        "backhaul_trainer_fallbacks_total",
        "Segments that were meant for a worker and recomputed by the trainer",
        lambda s: s.trainers.totals.fallbacks,
    ),
    _trainer(
        "backhaul_trainer_retries_total", "Requests that trainers made again", lambda s: s.trainers.totals.retries
    ),
    _trainer(
        "backhaul_trainer_mismatches_total",
        "Recomputations whose values trainers refused",
        lambda s: s.trainers.totals.mismatches,
    ),
    _trainers(
        "backhaul_trainer_lane_seconds_total",
        "What segments spent where, which overlaps: forward is of those that a worker recomputed, queue also of those "
        "recomputed ahead, which costs nothing; in wait backward stood still",
        lambda sums: [
            ("forward", sums.remote_forward_s),
            ("upload", sums.upload_s),
            ("queue", sums.queue_s),
            ("recompute", sums.recompute_s),
            ("backward", sums.backward_s),
            ("download", sums.download_s),
            ("wait", sums.wait_s),
        ],
        "lane",
    ),
    _trainer(
        "backhaul_trainer_exposed_queue_seconds_total",
        "That backward stood still while a segment waited behind other work on its worker",
        lambda s: s.trainers.totals.exposed_queue_s,
    ),
    _trainer(
        "backhaul_trainer_overhead_seconds_total",
        "Spent on recording, digests and sending in trainers' own threads",
        lambda s: s.trainers.totals.overhead_s,
    ),
    _trainer(
        "backhaul_trainer_spared_seconds_total",
        "What trainers would have taken to recompute what workers did",
        lambda s: s.trainers.totals.spared_s,
    ),
    _trainers(
        "backhaul_trainer_transferred_bytes_total",
        "Tensors up to workers and down from them",
        lambda sums: [("up", sums.up_bytes), ("down", sums.down_bytes)],
        "direction",
    ),
    _trainer(
        "backhaul_trainer_saved_bytes",
        "What running trainers hold less thanks to workers, at the end of their last steps",
        lambda s: s.trainers.saved_bytes,
        "gauge",
    ),
    _trainer(
        "backhaul_trainer_dropped_reports_total",
        "Steps and calls that were not told, or not taken, for want of room",
        lambda s: s.trainers.dropped,
    ),
)
