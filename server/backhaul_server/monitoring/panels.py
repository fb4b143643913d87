"""What the Grafana dashboard shows: rows of panels, each with queries over our metrics."""

from dataclasses import dataclass
from typing import Literal

from backhaul_server.dashboard.metrics.alerts import ALERTS, MOST_MEMORY

Kind = Literal["timeseries", "stat", "heatmap", "table"]

_RATE = "[$__rate_interval]"
_WORKER = 'worker=~"$worker"'


@dataclass(frozen=True, slots=True)
class Query:
    """A line of a panel, or several: the legend names labels in double braces."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel.

    Attributes:
        title: The heading of the panel.
        about: What to read from it.
        unit: One of Grafana's units.
        queries: The queries that give the panel's lines.
        kind: How it is drawn.
        width: The width in columns of the grid, of which there are 24.
        is_stacked: Whether lines lie upon each other.
        limit: From where on a value is marked red, None for nowhere.
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
    """A trainers' counter by step."""
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
                "How many answer, of those that the dashboard watches",
                "short",
                (Query("sum(backhaul_worker_up)", "answer"), Query("count(backhaul_worker_up)", "watched")),
                "stat",
                4,
            ),
            Panel(
                "Alerts",
                "Firing now: see docs/monitoring.md for what to do",
                "short",
                (Query(f'count(ALERTS{{alertstate="firing", alertname=~"{_FIRING}"}}) or vector(0)', "firing"),),
                "stat",
                3,
                limit=1,
            ),
            Panel(
                "Trainers",
                "Heard of a moment ago",
                "short",
                (Query("backhaul_trainer_runs", "running"),),
                "stat",
                3,
            ),
            Panel(
                "Steps",
                "Of all trainers together",
                "cps",
                (Query(f"sum(rate(backhaul_trainer_steps_total{_RATE}))", "steps"),),
                "stat",
                3,
            ),
            Panel(
                "Memory saved",
                "What running trainers hold less thanks to workers, at the end of their last steps",
                "bytes",
                (Query("backhaul_trainer_saved_bytes", "saved"),),
                "stat",
                4,
            ),
            Panel(
                "Recomputed on workers",
                "Of all recomputations",
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
                "In the last 5 minutes: meant for a worker, recomputed by the trainer",
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
                "All workers chosen above. The cache gives way to the other tiers by itself",
                "bytes",
                (
                    Query(f"sum by (tier) (backhaul_worker_memory_bytes{{{_WORKER}}})", "{{tier}}"),
                    Query(f"sum(backhaul_worker_memory_budget_bytes{{{_WORKER}}})", "budget"),
                ),
                width=12,
                is_stacked=True,
            ),
            Panel(
                "Share of the budget",
                "Without the cache, which gives way by itself",
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
                "Resident, as the workers' kernels count it",
                "bytes",
                (Query(f"backhaul_worker_resident_memory_bytes{{{_WORKER}}}", "{{worker}}"),),
            ),
            Panel(
                "Segments held",
                "For a backward to come",
                "short",
                (Query(f"backhaul_worker_segments{{{_WORKER}}}", "{{worker}}"),),
            ),
            Panel(
                "Want of room",
                "Refused segments run on the trainer, what is evicted is computed or sent again",
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
                "Percentiles by method, as workers serve them, transfers included",
                "s",
                (_quantile(0.5), _quantile(0.9), _quantile(0.99)),
                width=12,
            ),
            Panel(
                "Heat of durations",
                "How many calls took how long",
                "s",
                (Query(f"sum by (le) ({_rate('backhaul_rpc_duration_seconds_bucket')})", "{{le}}"),),
                "heatmap",
                12,
            ),
            Panel(
                "Segments of a step, by lane",
                "Seconds of all its segments together: they overlap each other and the trainer",
                "s",
                (Query(_per_step("backhaul_trainer_lane_seconds_total", "lane"), "{{lane}}"),),
            ),
            Panel(
                "Added to a step",
                "Exposed wait and own overhead, against what the trainer would have taken to recompute by itself",
                "s",
                (
                    Query(_per_step('backhaul_trainer_lane_seconds_total{lane="wait"}'), "wait"),
                    Query(_per_step("backhaul_trainer_exposed_queue_seconds_total"), "wait, of it in a queue"),
                    Query(_per_step("backhaul_trainer_overhead_seconds_total"), "overhead"),
                    Query(_per_step("backhaul_trainer_spared_seconds_total"), "spared"),
                ),
            ),
            Panel(
                "Calls",
                "By method, and those that failed",
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
                "By who did them",
                "cps",
                (
                    Query(
                        f"sum by (decision) ({_rate('backhaul_trainer_recomputations_total', False)})", "{{decision}}"
                    ),
                ),
                is_stacked=True,
            ),
            Panel(
                "What went wrong",
                "Each ended in the same gradient, computed elsewhere or again",
                "cps",
                (
                    Query(_rate("backhaul_trainer_fallbacks_total", False), "fallbacks"),
                    Query(_rate("backhaul_trainer_retries_total", False), "retries"),
                    Query(_rate("backhaul_trainer_mismatches_total", False), "refused values"),
                    Query(_rate("backhaul_trainer_dropped_reports_total", False), "reports dropped"),
                ),
            ),
            Panel(
                "Transfer",
                "Tensors to workers and back",
                "Bps",
                (Query(_rate("backhaul_trainer_transferred_bytes_total", False), "{{direction}}"),),
            ),
        ),
    ),
    (
        "Workers",
        (
            Panel(
                "Sessions",
                "Open ones",
                "short",
                (Query(f"backhaul_worker_sessions{{{_WORKER}}}", "{{worker}}"),),
                width=6,
            ),
            Panel(
                "Queue",
                "Requests that wait or run",
                "short",
                (Query(f"backhaul_worker_queued_requests{{{_WORKER}}}", "{{worker}}"),),
                width=6,
            ),
            Panel(
                "Replays",
                "That ran, those ahead of their request included",
                "cps",
                (Query(_rate("backhaul_worker_recomputed_segments_total"), "{{worker}}"),),
                width=6,
            ),
            Panel(
                "Wire",
                "Messages received and sent",
                "Bps",
                (
                    Query(_rate("backhaul_worker_received_bytes_total"), "received {{worker}}"),
                    Query(_rate("backhaul_worker_sent_bytes_total"), "sent {{worker}}"),
                ),
                width=6,
            ),
            Panel(
                "Drift",
                "Largest relative difference between a worker's numbers and a trainer's, 0 where all bits are equal",
                "sci",
                (Query(f"backhaul_worker_drift_ratio{{{_WORKER}}}", "{{worker}}"),),
                width=6,
            ),
            Panel(
                "Skew",
                "Sessions of another version than their worker's, and runs on workers that compute different bits",
                "short",
                (
                    Query(f"backhaul_worker_skewed_sessions{{{_WORKER}}}", "versions {{worker}}"),
                    Query("backhaul_trainer_mixed_runs", "mixed runs"),
                ),
                width=6,
            ),
            Panel(
                "Uptime",
                "Falls to 0 at a restart, which loses what was held",
                "s",
                (Query(f"backhaul_worker_uptime_seconds{{{_WORKER}}}", "{{worker}}"),),
                width=6,
            ),
            Panel(
                "Draining",
                "1 while a worker takes nothing new",
                "short",
                (Query(f"backhaul_worker_draining{{{_WORKER}}}", "{{worker}}"),),
                width=6,
            ),
            Panel(
                "What they run",
                "Equal fingerprints compute equal bits",
                "short",
                (Query(f"backhaul_worker_info{{{_WORKER}}}", "{{worker}}"),),
                "table",
                24,
            ),
        ),
    ),
)
