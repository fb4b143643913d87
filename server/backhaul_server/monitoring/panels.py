"""The rows and panels of the Grafana dashboard, each panel with its queries."""

from dataclasses import dataclass
from typing import Literal

from backhaul_server.dashboard.metrics.alerts import ALERTS, MOST_MEMORY

Kind = Literal["timeseries", "stat", "heatmap", "table"]

_RATE = "[$__rate_interval]"
_WORKER = 'worker=~"$worker"'


@dataclass(frozen=True, slots=True)
class Query:
    """One or more lines of a panel. The legend names labels in double braces."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel of the Grafana dashboard.

    Attributes:
        title: The heading of the panel.
        about: The description that people read.
        unit: The unit of its values, in Grafana's notation.
        queries: The queries that give the panel's lines.
        kind: The type of the visualization.
        width: The width in columns; the grid has 24.
        is_stacked: Whether the lines are stacked.
        limit: The value from which on values are red; None if none are.
    """

    title: str
    about: str
    unit: str
    queries: tuple[Query, ...]
    kind: Kind = "timeseries"
    width: int = 8
    is_stacked: bool = False
    limit: float | None = None


def _rate(metric: str, of_workers: bool = True) -> str:
    return f"rate({metric}{{{_WORKER}}}{_RATE})" if of_workers else f"rate({metric}{_RATE})"


def _per_step(metric: str, by: str = "") -> str:
    """Returns a query for the increase of a trainers' counter per step."""
    total = f"sum by ({by}) (rate({metric}{_RATE}))" if by else f"sum(rate({metric}{_RATE}))"
    return f"{total} / {'scalar' if by else ''}(sum(rate(backhaul_trainer_steps_total{_RATE})))"


def _quantile(share: float) -> Query:
    buckets = f"sum by (le, method) ({_rate('backhaul_rpc_duration_seconds_bucket')})"
    return Query(f"histogram_quantile({share}, {buckets})", f"p{share * 100:.0f} {{{{method}}}}")


_FIRING = "|".join(rule.name for rule in ALERTS)

ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "At a glance",
        (
            Panel(
                "Workers",
                "Workers that answer, and all that the dashboard watches",
                "short",
                (Query("sum(backhaul_worker_up)", "answer"), Query("count(backhaul_worker_up)", "watched")),
                "stat",
                4,
            ),
            Panel(
                "Alerts",
                "Alerts that fire now; docs/monitoring.md says what to do about each",
                "short",
                (Query(f'count(ALERTS{{alertstate="firing", alertname=~"{_FIRING}"}}) or vector(0)', "firing"),),
                "stat",
                3,
                limit=1,
            ),
            Panel(
                "Trainers",
                "Trainers that have reported recently",
                "short",
                (Query("backhaul_trainer_runs", "running"),),
                "stat",
                3,
            ),
            Panel(
                "Steps",
                "Steps per second of all trainers",
                "cps",
                (Query(f"sum(rate(backhaul_trainer_steps_total{_RATE}))", "steps"),),
                "stat",
                3,
            ),
            Panel(
                "Memory saved",
                "Bytes that running trainers save because workers recompute, as of the end of their last step",
                "bytes",
                (Query("backhaul_trainer_saved_bytes", "saved"),),
                "stat",
                4,
            ),
            Panel(
                "Recomputed on workers",
                "Share of all recomputations that ran on workers",
                "percentunit",
                (
                    Query(
                        f'sum(rate(backhaul_trainer_recomputations_total{{decision!="trainer"}}{_RATE})) / '
                        f"sum(rate(backhaul_trainer_recomputations_total{_RATE}))",
                        "on workers",
                    ),
                ),
                "stat",
                4,
            ),
            Panel(
                "Fallbacks",
                "Segments of the last 5 minutes that were meant for a worker but ran on the trainer",
                "short",
                (Query("sum(increase(backhaul_trainer_fallbacks_total[5m]))", "fallbacks"),),
                "stat",
                3,
                limit=1,
            ),
        ),
    ),
    (
        "Memory of workers",
        (
            Panel(
                "Held by tier",
                "Bytes of the selected workers. The cache is evicted when other tiers need memory",
                "bytes",
                (
                    Query(f"sum by (tier) (backhaul_worker_memory_bytes{{{_WORKER}}})", "{{tier}}"),
                    Query(f"sum(backhaul_worker_memory_reserve_bytes{{{_WORKER}}})", "reserve"),
                    Query(f"sum(backhaul_worker_memory_budget_bytes{{{_WORKER}}})", "budget"),
                ),
                width=12,
                is_stacked=True,
            ),
            Panel(
                "Share of the budget",
                "Used share without the cache, which is evicted when memory is needed",
                "percentunit",
                (
                    Query(
                        f'sum by (worker) (backhaul_worker_memory_bytes{{tier!="cached", {_WORKER}}}) / '
                        f"sum by (worker) (backhaul_worker_memory_budget_bytes{{{_WORKER}}})",
                        "{{worker}}",
                    ),
                ),
                width=12,
                limit=MOST_MEMORY,
            ),
            Panel(
                "Process",
                "Resident memory of the workers' processes",
                "bytes",
                (Query(f"backhaul_worker_resident_memory_bytes{{{_WORKER}}}", "{{worker}}"),),
            ),
            Panel(
                "Segments held",
                "Segments that wait for their backward",
                "short",
                (Query(f"backhaul_worker_segments{{{_WORKER}}}", "{{worker}}"),),
            ),
            Panel(
                "Memory shortage",
                "Refused segments run on the trainer; evicted tensors and results are sent or computed again",
                "cps",
                (
                    Query(_rate("backhaul_worker_refusals_total"), "refused {{worker}}"),
                    Query(_rate("backhaul_worker_evictions_total"), "evicted {{worker}}"),
                ),
            ),
        ),
    ),
    (
        "Latency",
        (
            Panel(
                "Calls by duration",
                "Percentiles of call durations on the workers by method, including transfers",
                "s",
                (_quantile(0.5), _quantile(0.9), _quantile(0.99)),
                width=12,
            ),
            Panel(
                "Heat map of durations",
                "Number of calls by duration",
                "s",
                (Query(f"sum by (le) ({_rate('backhaul_rpc_duration_seconds_bucket')})", "{{le}}"),),
                "heatmap",
                12,
            ),
            Panel(
                "Segments of a step, by lane",
                "Seconds of all segments of a step. They overlap each other and the trainer's work",
                "s",
                (Query(_per_step("backhaul_trainer_lane_seconds_total", "lane"), "{{lane}}"),),
            ),
            Panel(
                "Added to a step",
                "Exposed wait and overhead, compared with the time that local recomputation would have taken",
                "s",
                (
                    Query(_per_step('backhaul_trainer_lane_seconds_total{lane="wait"}'), "wait"),
                    Query(_per_step("backhaul_trainer_exposed_queue_seconds_total"), "wait in a queue"),
                    Query(_per_step("backhaul_trainer_overhead_seconds_total"), "overhead"),
                    Query(_per_step("backhaul_trainer_spared_seconds_total"), "spared"),
                ),
            ),
            Panel(
                "Calls",
                "Calls and failed calls by method",
                "cps",
                (
                    Query(f"sum by (method) ({_rate('backhaul_rpc_duration_seconds_count')})", "{{method}}"),
                    Query(f"sum by (method) ({_rate('backhaul_rpc_errors_total')})", "failed {{method}}"),
                ),
            ),
        ),
    ),
    (
        "Trainers",
        (
            Panel(
                "Recomputations",
                "Recomputations by decision",
                "cps",
                (
                    Query(
                        f"sum by (decision) ({_rate('backhaul_trainer_recomputations_total', False)})", "{{decision}}"
                    ),
                ),
                width=6,
                is_stacked=True,
            ),
            Panel(
                "What went wrong",
                "Each of these cases ended with the same gradients, computed elsewhere or again",
                "cps",
                (
                    Query(_rate("backhaul_trainer_fallbacks_total", False), "fallbacks"),
                    Query(_rate("backhaul_trainer_retries_total", False), "retries"),
                    Query(_rate("backhaul_trainer_mismatches_total", False), "rejected values"),
                    Query(_rate("backhaul_trainer_dropped_reports_total", False), "reports dropped"),
                ),
                width=6,
            ),
            Panel(
                "Transfer",
                "Bytes of tensors sent to workers and received from them, and bytes that differences have spared",
                "Bps",
                (
                    Query(_rate("backhaul_trainer_transferred_bytes_total", False), "{{direction}}"),
                    Query(_rate("backhaul_trainer_spared_bytes_total", False), "spared"),
                ),
                width=6,
            ),
            Panel(
                "Events",
                "What trainers reported and what the dashboard saw, by kind",
                "cps",
                (Query(_rate("backhaul_events_total", False), "{{kind}}"),),
                width=6,
                is_stacked=True,
            ),
        ),
    ),
    (
        "Workers",
        (
            Panel(
                "Sessions",
                "Open sessions by worker",
                "short",
                (Query(f"backhaul_worker_sessions{{{_WORKER}}}", "{{worker}}"),),
                width=6,
            ),
            Panel(
                "Queue",
                "Requests that wait or run, by worker",
                "short",
                (Query(f"backhaul_worker_queued_requests{{{_WORKER}}}", "{{worker}}"),),
                width=6,
            ),
            Panel(
                "Replays",
                "Replays per second, including speculative ones",
                "cps",
                (Query(_rate("backhaul_worker_recomputed_segments_total"), "{{worker}}"),),
                width=6,
            ),
            Panel(
                "Wire",
                "Bytes of received and sent messages, and bytes that differences of tensors have spared",
                "Bps",
                (
                    Query(_rate("backhaul_worker_received_bytes_total"), "received {{worker}}"),
                    Query(_rate("backhaul_worker_sent_bytes_total"), "sent {{worker}}"),
                    Query(_rate("backhaul_worker_spared_bytes_total"), "spared {{worker}}"),
                ),
                width=6,
            ),
            Panel(
                "Load",
                "Share of the time in which each worker computed",
                "percentunit",
                (Query(_rate("backhaul_worker_busy_seconds_total"), "{{worker}}"),),
            ),
            Panel(
                "GPU utilization",
                "Share of the time in which a kernel ran, for workers that have the extra nvml",
                "percentunit",
                (Query(f"backhaul_worker_accelerator_utilization_ratio{{{_WORKER}}}", "{{worker}}"),),
            ),
            Panel(
                "GPU memory",
                "Used by all processes on the GPU of each worker, and in all",
                "bytes",
                (Query(f"backhaul_worker_accelerator_memory_bytes{{{_WORKER}}}", "{{kind}} {{worker}}"),),
            ),
            Panel(
                "Drift",
                "Largest relative difference between the numbers of a worker and a trainer; 0 if equal",
                "sci",
                (Query(f"backhaul_worker_drift_ratio{{{_WORKER}}}", "{{worker}}"),),
                width=6,
            ),
            Panel(
                "Skew",
                "Sessions whose version differs from their worker's, and runs whose workers compute different bits",
                "short",
                (
                    Query(f"backhaul_worker_skewed_sessions{{{_WORKER}}}", "versions {{worker}}"),
                    Query("backhaul_trainer_mixed_runs", "mixed runs"),
                ),
                width=6,
            ),
            Panel(
                "Uptime",
                "Seconds since each worker started. A restart loses everything that the worker held",
                "s",
                (Query(f"backhaul_worker_uptime_seconds{{{_WORKER}}}", "{{worker}}"),),
                width=6,
            ),
            Panel(
                "Draining",
                "1 while a worker is shutting down and accepts no new work",
                "short",
                (Query(f"backhaul_worker_draining{{{_WORKER}}}", "{{worker}}"),),
                width=6,
            ),
            Panel(
                "Versions",
                "Equal fingerprints compute equal bits",
                "short",
                (Query(f"backhaul_worker_info{{{_WORKER}}}", "{{worker}}"),),
                "table",
                24,
            ),
        ),
    ),
)
