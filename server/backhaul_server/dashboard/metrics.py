"""/metrics in the form Prometheus reads, named by its rules: base units, `_total` for counters, no ids in labels."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from backhaul_server.dashboard.watch import Watch

_TIERS = {
    "segments": "segment_bytes",
    "cached": "cached_bytes",
    "working": "working_bytes",
    "results": "result_bytes",
}


class _Workers(Collector):
    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("backhaul_worker_up", "Whether the worker answers", labels=["worker"])
        memory = GaugeMetricFamily("backhaul_worker_memory_bytes", "Held by tier", labels=["worker", "tier"])
        budget = GaugeMetricFamily("backhaul_worker_memory_budget_bytes", "Limit of all tiers", labels=["worker"])
        resident = GaugeMetricFamily("backhaul_worker_resident_memory_bytes", "Of the process", labels=["worker"])
        refusals = CounterMetricFamily("backhaul_worker_refusals", "Requests without room", labels=["worker"])
        sessions = GaugeMetricFamily("backhaul_worker_sessions", "Open sessions", labels=["worker"])
        drift = GaugeMetricFamily(
            "backhaul_worker_drift_ratio", "Largest between its numbers and a trainer's", labels=["worker"]
        )
        segments = GaugeMetricFamily("backhaul_worker_segments", "Saved segments", labels=["worker"])
        queued = GaugeMetricFamily("backhaul_worker_queued_requests", "Waiting or running", labels=["worker"])
        recomputed = CounterMetricFamily("backhaul_worker_recomputed_segments", "Recomputed", labels=["worker"])
        received = CounterMetricFamily("backhaul_worker_received_bytes", "Of messages", labels=["worker"])
        sent = CounterMetricFamily("backhaul_worker_sent_bytes", "Of messages", labels=["worker"])
        rpcs = SummaryMetricFamily("backhaul_rpc_duration_seconds", "Served calls", labels=["worker", "method"])
        errors = CounterMetricFamily("backhaul_rpc_errors", "Failed calls", labels=["worker", "method"])
        for worker in self._watch.workers:
            label = [worker.address.text]
            up.add_metric(label, float(worker.state != "unreachable"))
            found = worker.telemetry
            if found is None:
                continue
            for tier, field in _TIERS.items():
                memory.add_metric([*label, tier], getattr(found.memory, field))
            budget.add_metric(label, found.memory.budget_bytes)
            resident.add_metric(label, found.memory.resident_bytes)
            refusals.add_metric(label, found.memory.refusals)
            sessions.add_metric(label, len(found.sessions))
            segments.add_metric(label, sum(session.segments for session in found.sessions))
            drift.add_metric(label, max((session.drift for session in found.sessions), default=0.0))
            queued.add_metric(label, found.queued_requests)
            recomputed.add_metric(label, found.recomputed_segments)
            received.add_metric(label, found.received_bytes)
            sent.add_metric(label, found.sent_bytes)
            for rpc in found.rpcs:
                method = [*label, rpc.method]
                rpcs.add_metric(method, count_value=rpc.calls, sum_value=rpc.total_s)
                errors.add_metric(method, rpc.errors)
        yield from (up, memory, budget, resident, refusals, sessions, drift, segments, queued)
        yield from (recomputed, received, sent, rpcs, errors)


def exposition(watch: Watch) -> bytes:
    """All metrics now, as text."""
    registry = CollectorRegistry()
    registry.register(_Workers(watch))
    return generate_latest(registry)
