"""What should be looked at: one table for the page and for Prometheus."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from backhaul_server.dashboard.collect.runs import TrainerRun
from backhaul_server.dashboard.collect.totals import WINDOW_S, Totals
from backhaul_server.dashboard.collect.watch import Watch
from backhaul_server.dashboard.collect.watched import Watched

MOST_FALLBACKS = 0.01
MOST_MEMORY = 0.8
_MEMORY_WINDOW_S = 60.0
_RATE = f"[{WINDOW_S // 60}m]"

Found = Iterator[tuple[str, str]]
"""Subjects that a condition holds for, each with what is the matter and what to do."""


@dataclass(frozen=True, slots=True)
class AlertRule:
    """One alert.

    Attributes:
        name: As Prometheus names it too.
        severity: "critical" where segments are not recomputed remotely for it.
        summary: What the alert means, without values.
        advice: What to do, for the docs and Prometheus' annotations.
        expr: The same condition in PromQL, of all trainers together where it is of trainers.
        for_s: How long Prometheus waits with it, which sees less of it; the page shows it at once.
        condition: Given all workers and runs, and the time.
    """

    name: str
    severity: Literal["warning", "critical"]
    summary: str
    advice: str
    expr: str
    for_s: int
    condition: Callable[[Watch, float], Found]


def _worker_unreachable(watch: Watch, now_s: float) -> Found:
    for worker in watch.workers:
        if worker.was_asked and worker.state == "unreachable":
            yield (
                worker.address.text,
                f"{worker.address.text} does not answer ({worker.error}); its segments run on trainers meanwhile. "
                "See whether its process lives, and whether it can be reached from here",
            )


def _fallback_rate_high(watch: Watch, now_s: float) -> Found:
    for run, recent in _recent(watch, now_s):
        if recent.fallback_rate > MOST_FALLBACKS:
            yield (
                run.id,
                f"{recent.fallback_rate:.1%} of what {run.about.trainer} meant for workers ran on the trainer in the "
                f"last 5 minutes ({recent.fallbacks:.0f} recomputations). The table of segments has the reasons",
            )


def _queue_wait_high(watch: Watch, now_s: float) -> Found:
    for run, recent in _recent(watch, now_s):
        if recent.exposed_queue_s > recent.recompute_s > 0:
            yield (
                run.id,
                f"in the last 5 minutes backward of {run.about.trainer} stood still for {recent.exposed_queue_s:.3g} s "
                f"while its segments waited behind other work, and they were recomputed in {recent.recompute_s:.3g} s. "
                "Add a worker, or give these fewer trainers",
            )


def _memory_high(watch: Watch, now_s: float) -> Found:
    for worker in watch.workers:
        share = _memory_share(worker, now_s)
        if share > MOST_MEMORY:
            yield (
                worker.address.text,
                f"{worker.address.text} used {share:.0%} of its memory in the last minute, the cache not counted. What "
                "does not fit runs on trainers: raise --memory, or add a worker",
            )


def _memory_share(worker: Watched, now_s: float) -> float:
    """The largest share of its budget in the last minute, without the cache, which is evicted when room is needed."""
    if not worker.budget_bytes or worker.state == "unreachable":
        return 0.0
    segments, _, working, results = worker.memory.columns
    rows = range(worker.memory.since(now_s - _MEMORY_WINDOW_S), len(segments))
    return max((segments[row] + working[row] + results[row] for row in rows), default=0.0) / worker.budget_bytes


def _link_slow(watch: Watch, now_s: float) -> Found:
    for run, recent in _recent(watch, now_s):
        if recent.transfer_s > recent.remote_forward_s > 0:
            yield (
                run.id,
                f"in the last 5 minutes segments of {run.about.trainer} took {recent.transfer_s:.3g} s to send and "
                f"fetch, and spared {recent.remote_forward_s:.3g} s of forward: recomputing on the trainer would be "
                "faster. Make segments longer, or the link faster",
            )


def _version_skew(watch: Watch, now_s: float) -> Found:
    versions = {w.address.text: w.telemetry.worker_version for w in watch.workers if w.telemetry and not w.error}
    for worker in watch.workers:
        versions |= {(s.run or s.trainer): s.client_version for s in worker.sessions() if s.client_version}
    if len(set(versions.values())) > 1:
        most = Counter(versions.values()).most_common(1)[0][0]
        for subject, version in versions.items():
            if version != most:
                yield subject, f"{subject} has version {version}, most others have {most}: install the same everywhere"


def _fingerprint_skew(watch: Watch, now_s: float) -> Found:
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
                f"its workers ({names}) differ in {', '.join(keys)}: their numbers differ from each other's. Use "
                "workers of one kind for a run",
            )


def _recent(watch: Watch, now_s: float) -> Iterator[tuple[TrainerRun, Totals]]:
    for run in watch.trainers:
        if run.state(now_s) != "ended" and run.heard_at_s >= now_s - WINDOW_S:
            yield run, run.recent.since(now_s - WINDOW_S)


ALERTS: tuple[AlertRule, ...] = (
    AlertRule(
        "WorkerUnreachable",
        "critical",
        "A worker does not answer; its segments run on trainers",
        "See whether its process lives, what it logged last, and whether the dashboard's machine reaches its address. "
        "Training goes on: trainers recompute by themselves, slower and with more memory, and return to the worker "
        "once it is back. One that should not come back is taken off the dashboard's `--worker` and off `connect()`",
        "backhaul_worker_up == 0",
        30,
        _worker_unreachable,
    ),
    AlertRule(
        "FallbackRateHigh",
        "critical",
        "More than 1 % of the recomputations meant for workers ran on trainers",
        "The dashboard's table of segments says of each why, and so does `session.report()`. Want of room: raise "
        "`--memory` or add a worker. Silence or broken connections: look at the worker's log and at the network. "
        "Refused values: the worker has other hardware or another build than it says, see guarantees.md",
        f"sum(rate(backhaul_trainer_fallbacks_total{_RATE})) / (sum(rate(backhaul_trainer_fallbacks_total{_RATE})) + "
        f'sum(rate(backhaul_trainer_recomputations_total{{decision=~"gradients|activations"}}{_RATE}))) '
        f"> {MOST_FALLBACKS}",
        60,
        _fallback_rate_high,
    ),
    AlertRule(
        "QueueWaitHigh",
        "warning",
        "Backward stands still longer while segments wait behind other work than they take to recompute",
        "More trainers share a worker than it can serve. Add a worker, or give this one fewer trainers. Trainers whose "
        "segments would wait more than twice as long as they take recompute by themselves, which shows as fallbacks",
        f"sum(rate(backhaul_trainer_exposed_queue_seconds_total{_RATE})) > "
        f'sum(rate(backhaul_trainer_lane_seconds_total{{lane="recompute"}}{_RATE}))',
        60,
        _queue_wait_high,
    ),
    AlertRule(
        "MemoryHigh",
        "warning",
        "A worker uses more than 80 % of its memory, the cache not counted",
        "What does not fit is refused and runs on trainers, and less is recomputed ahead. Raise `--memory` if the "
        "machine has more, add a worker, or make fewer segments wait at once: fewer trainers, smaller batches. A cache "
        "that fills the rest is no reason to worry, it gives way by itself",
        'sum by (worker) (backhaul_worker_memory_bytes{tier!="cached"}) / '
        f"sum by (worker) (backhaul_worker_memory_budget_bytes) > {MOST_MEMORY}",
        60,
        _memory_high,
    ),
    AlertRule(
        "LinkSlow",
        "warning",
        "Sending and fetching segments takes longer than the forward time it spares",
        "Recomputing on the trainer would be faster, if it has the memory. Make segments longer: what a segment moves "
        "does not grow with its length, what it spares does. Or use a faster link, larger batches, frozen weights or "
        "LoRA, or a worker that is nearer",
        f'sum(rate(backhaul_trainer_lane_seconds_total{{lane=~"upload|download"}}{_RATE})) > '
        f'sum(rate(backhaul_trainer_lane_seconds_total{{lane="forward"}}{_RATE}))',
        60,
        _link_slow,
    ),
    AlertRule(
        "VersionSkew",
        "warning",
        "Workers and trainers have different versions",
        "Install the same version of Backhaul everywhere. Versions that don't understand each other refuse to connect; "
        "those that do may still lack each other's improvements. During a rolling upgrade this passes by itself",
        "count(count by (version) (backhaul_worker_info)) > 1 or sum(backhaul_worker_skewed_sessions) > 0",
        60,
        _version_skew,
    ),
    AlertRule(
        "FingerprintSkew",
        "warning",
        "Workers of one run compute different numbers",
        "The run's segments are spread over workers of different hardware or builds, so they are compared within "
        "tolerances instead of bit by bit, and the drift depends on which worker had a segment. Give a run workers of "
        "one kind; the dashboard's list of workers shows in what they differ",
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


class Alerts:
    """Those that hold, and since when. Somebody should look once a second."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._since: dict[tuple[str, str], float] = {}

    def evaluate(self, now_s: float) -> list[FiringAlert]:
        """Looks: critical ones first, then in the order of the table. One that held the last time began when it did."""
        before, self._since, firing = self._since, {}, []
        for rule in ALERTS:
            for subject, summary in rule.condition(self._watch, now_s):
                since_s = before.get((rule.name, subject), now_s)
                self._since[rule.name, subject] = since_s
                firing.append(FiringAlert(rule.name, rule.severity, subject, summary, since_s))
        return sorted(firing, key=lambda alert: alert.severity)
