"""The alerts: one table for the page, `backhaul top` and Prometheus."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from backhaul_server.dashboard.collect.percentages import in_percent
from backhaul_server.dashboard.collect.runs import TrainerRun
from backhaul_server.dashboard.collect.totals import WINDOW_S, Totals
from backhaul_server.dashboard.collect.watch import Watch
from backhaul_server.dashboard.collect.watched import Watched

MOST_FALLBACKS = 0.01
MOST_MEMORY = 0.8
_MEMORY_WINDOW_S = 60.0
_RATE = f"[{WINDOW_S // 60}m]"

Subjects = Iterator[tuple[str, str]]
"""The subjects for which a condition holds, each with a summary: what happened, and what to do."""


@dataclass(frozen=True, slots=True)
class AlertRule:
    """The rule of an alert.

    Attributes:
        name: The name of the alert, also in Prometheus.
        severity: "critical" if segments are not recomputed remotely while the alert fires.
        summary: The meaning of the alert, without values.
        advice: What to do, for the documentation and Prometheus' annotations.
        expr: The PromQL expression that fires the alert in Prometheus. It sums over all trainers, while `condition`
            looks at each run.
        for_s: Seconds for which the condition must hold in Prometheus. The page shows an alert at once.
        condition: Takes the watch and the time, and yields the subjects for which the condition holds.
    """

    name: str
    severity: Literal["warning", "critical"]
    summary: str
    advice: str
    expr: str
    for_s: int
    condition: Callable[[Watch, float], Subjects]


def _worker_unreachable(watch: Watch, now_s: float) -> Subjects:
    for worker in watch.workers:
        if worker.was_asked and worker.state == "unreachable":
            yield (
                worker.address.text,
                f"Worker {worker.address.text} does not answer ({worker.error}), so its segments run on the trainers. "
                "Check that its process runs and that its address can be reached from this machine",
            )


def _fallback_rate_high(watch: Watch, now_s: float) -> Subjects:
    for run, recent in _recent(watch, now_s):
        if recent.fallback_rate > MOST_FALLBACKS:
            yield (
                run.id,
                f"{in_percent(recent.fallback_rate)} of the recomputations that trainer {run.about.trainer} meant for "
                f"workers ran on the trainer in the last 5 minutes ({recent.fallbacks:.0f}). The table of segments "
                "shows why",
            )


def _queue_wait_high(watch: Watch, now_s: float) -> Subjects:
    for run, recent in _recent(watch, now_s):
        if recent.exposed_queue_s > recent.recompute_s > 0:
            yield (
                run.id,
                f"In the last 5 minutes backward of trainer {run.about.trainer} was blocked for "
                f"{recent.exposed_queue_s:.3g} s by segments in a worker's queue, and their recomputation took "
                f"{recent.recompute_s:.3g} s. Add a worker, or connect fewer trainers to each worker",
            )


def _memory_high(watch: Watch, now_s: float) -> Subjects:
    for worker in watch.workers:
        share = _memory_share(worker, now_s)
        if share > MOST_MEMORY:
            yield (
                worker.address.text,
                f"Worker {worker.address.text} used {in_percent(share)} of its memory in the last minute, not counting "
                "its cache. Segments that do not fit run on the trainers. Raise --memory, or add a worker",
            )


def _memory_share(worker: Watched, now_s: float) -> float:
    """Returns the largest used share of a worker's budget in the last minute, without the cache, which is evictable."""
    if not worker.budget_bytes or worker.state == "unreachable":
        return 0.0
    segments, _, working, results = worker.memory.columns
    rows = range(worker.memory.since(now_s - _MEMORY_WINDOW_S), len(segments))
    return max((segments[row] + working[row] + results[row] for row in rows), default=0.0) / worker.budget_bytes


def _link_slow(watch: Watch, now_s: float) -> Subjects:
    for run, recent in _recent(watch, now_s):
        if recent.transfer_s > recent.spared_s > 0:
            yield (
                run.id,
                f"In the last 5 minutes the segments of trainer {run.about.trainer} took {recent.transfer_s:.3g} s to "
                f"send and fetch, and the trainer alone would have computed what workers did in {recent.spared_s:.3g} "
                "s. Make the segments longer, or use a faster network",
            )


def _version_skew(watch: Watch, now_s: float) -> Subjects:
    versions = {w.address.text: w.telemetry.worker_version for w in watch.workers if w.telemetry and not w.error}
    for worker in watch.workers:
        versions |= {(s.run or s.trainer): s.client_version for s in worker.sessions() if s.client_version}
    if len(set(versions.values())) > 1:
        most = Counter(versions.values()).most_common(1)[0][0]
        for subject, version in versions.items():
            if version != most:
                yield subject, f"{subject} has version {version}, most others have {most}. Install the same version"


def _fingerprint_skew(watch: Watch, now_s: float) -> Subjects:
    workers: dict[str, list[Watched]] = {}
    for worker in watch.workers:
        for run in {session.run for session in worker.sessions()} - {""}:
            workers.setdefault(run, []).append(worker)
    for run, of_run in workers.items():
        prints = [dict(worker.telemetry.fingerprint) for worker in of_run if worker.telemetry is not None]
        keys = sorted(
            {
                key
                for fingerprint in prints
                for key in fingerprint
                if any(other.get(key) != fingerprint[key] for other in prints)
            }
        )
        if keys:
            names = ", ".join(worker.address.text for worker in of_run)
            yield (
                run,
                f"The workers of this run ({names}) differ in {', '.join(keys)}, so they compute different numbers. "
                "Use workers of one kind for a run",
            )


def _recent(watch: Watch, now_s: float) -> Iterator[tuple[TrainerRun, Totals]]:
    for run in watch.trainers:
        if run.state(now_s) != "ended" and run.heard_at_s >= now_s - WINDOW_S:
            yield run, run.recent.since(now_s - WINDOW_S)


ALERTS: tuple[AlertRule, ...] = (
    AlertRule(
        "WorkerUnreachable",
        "critical",
        "A worker does not answer, so its segments run on the trainers",
        "Check that its process runs, read the end of its log, and check that the dashboard's machine can reach its "
        "address. Training continues: trainers recompute by themselves, which takes more time and memory, and use the "
        "worker again once it is back. Remove a worker that will not come back from the dashboard's `--worker` and "
        "from `connect()`",
        "backhaul_worker_up == 0",
        30,
        _worker_unreachable,
    ),
    AlertRule(
        "FallbackRateHigh",
        "critical",
        "More than 1 % of the recomputations meant for workers ran on trainers",
        "The dashboard's table of segments and `session.report()` give the reason for each segment. If memory is "
        "short, raise `--memory` or add a worker. If workers are silent or connections break, check the worker's log "
        "and the network. If values were rejected, the worker's hardware or build differs from what it reports: see "
        "guarantees.md",
        f"sum(rate(backhaul_trainer_fallbacks_total{_RATE})) / (sum(rate(backhaul_trainer_fallbacks_total{_RATE})) + "
        f'sum(rate(backhaul_trainer_recomputations_total{{decision=~"gradients|activations"}}{_RATE}))) '
        f"> {MOST_FALLBACKS}",
        60,
        _fallback_rate_high,
    ),
    AlertRule(
        "QueueWaitHigh",
        "warning",
        "Queued segments block backward for longer than their recomputation takes",
        "More trainers share a worker than it can serve. Add a worker, or connect fewer trainers to it. If a segment "
        "would wait longer than 1 second and longer than twice its expected time, the trainer recomputes the segment "
        "itself, which counts as a fallback",
        f"sum(rate(backhaul_trainer_exposed_queue_seconds_total{_RATE})) > "
        f'sum(rate(backhaul_trainer_lane_seconds_total{{lane="recompute"}}{_RATE}))',
        60,
        _queue_wait_high,
    ),
    AlertRule(
        "MemoryHigh",
        "warning",
        "A worker uses more than 80 % of its memory, not counting its cache",
        "Segments that do not fit are refused and run on the trainers, and fewer replays are speculative. Raise "
        "`--memory` if the machine has more memory, add a worker, or let fewer segments wait at once: use fewer "
        "trainers or smaller batches. A cache that fills the rest is harmless, because it is evicted when memory is "
        "needed",
        'sum by (worker) (backhaul_worker_memory_bytes{tier!="cached"}) / '
        f"sum by (worker) (backhaul_worker_memory_budget_bytes) > {MOST_MEMORY}",
        60,
        _memory_high,
    ),
    AlertRule(
        "LinkSlow",
        "warning",
        "Sending and fetching segments takes longer than trainers would compute what workers do",
        "Unless the transfers overlap with other work, a step would be shorter if the trainer recomputed the segments. "
        "Make segments longer: a longer segment saves more time and moves the same bytes. Or use a faster network, "
        "larger batches, frozen weights or LoRA, or a worker that is closer",
        f'sum(rate(backhaul_trainer_lane_seconds_total{{lane=~"upload|download"}}{_RATE})) > '
        f"sum(rate(backhaul_trainer_spared_seconds_total{_RATE}))",
        60,
        _link_slow,
    ),
    AlertRule(
        "VersionSkew",
        "warning",
        "Workers and trainers have different versions",
        "Install the same version of Backhaul everywhere. Incompatible versions refuse to connect; compatible ones may "
        "still lack each other's improvements. The alert ends by itself after a rolling upgrade",
        "count(count by (version) (backhaul_worker_info)) > 1 or sum(backhaul_worker_skewed_sessions) > 0",
        60,
        _version_skew,
    ),
    AlertRule(
        "FingerprintSkew",
        "warning",
        "Workers of one run compute different numbers",
        "The run's segments are spread over workers with different hardware or builds. Their results are compared "
        "within tolerances instead of bit by bit, and the drift depends on the worker that had a segment. Give a run "
        "workers of one kind; the dashboard's table of workers shows how they differ",
        "backhaul_trainer_mixed_runs > 0",
        60,
        _fingerprint_skew,
    ),
)


@dataclass(frozen=True, slots=True)
class FiringAlert:
    """An alert whose condition holds.

    Attributes:
        name: The name of its rule.
        severity: The severity of its rule.
        subject: The address of the worker, or the id of the run, that it is about.
        summary: What happened, with the values, and what to do.
        since_s: When the condition began to hold, in seconds since 1970.
    """

    name: str
    severity: Literal["warning", "critical"]
    subject: str
    summary: str
    since_s: float

    @property
    def id(self) -> str:
        """A name that stays the same while the alert fires."""
        return f"{self.name}:{self.subject}"


class Alerts:
    """Evaluates the rules, and remembers since when each alert fires. Call `evaluate` about once a second."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._since: dict[tuple[str, str], float] = {}

    def evaluate(self, now_s: float) -> list[FiringAlert]:
        """Returns the alerts that fire now, critical ones first. An alert that fired last time keeps its `since_s`."""
        before, self._since, firing = self._since, {}, []
        for rule in ALERTS:
            for subject, summary in rule.condition(self._watch, now_s):
                since_s = before.get((rule.name, subject), now_s)
                self._since[rule.name, subject] = since_s
                firing.append(FiringAlert(rule.name, rule.severity, subject, summary, since_s))
        return sorted(firing, key=lambda alert: alert.severity)
