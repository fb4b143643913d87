"""The alerts of the page and of `backhaul top`.

deploy/prometheus/alerts.yml has the same ones for Prometheus, and docs/monitoring.md has a section for each.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from backhaul_server.dashboard.collect.percentages import in_percent
from backhaul_server.dashboard.collect.totals import WINDOW_S, Totals
from backhaul_server.dashboard.collect.training_runs import TrainerRun
from backhaul_server.dashboard.collect.watch import Watch
from backhaul_server.dashboard.collect.watched import Watched
from backhaul_server.dashboard.schemas.now import Alert

MOST_FALLBACKS = 0.01
MOST_MEMORY = 0.8
_MEMORY_WINDOW_S = 60.0

Subjects = Iterator[tuple[str, str]]
"""The subjects for which a condition holds, each with a summary: what happened, and what to do."""


@dataclass(frozen=True, slots=True)
class AlertRule:
    """The rule of an alert.

    Attributes:
        name: The name of the alert, also in Prometheus.
        severity: "critical" if segments are not recomputed remotely while the alert fires.
        condition: Takes the watch and the time, and yields the subjects for which the condition holds. It looks at each
            run, while Prometheus' expression sums over all trainers.
    """

    name: str
    severity: Literal["warning", "critical"]
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


ALERTS = (
    AlertRule("WorkerUnreachable", "critical", _worker_unreachable),
    AlertRule("FallbackRateHigh", "critical", _fallback_rate_high),
    AlertRule("QueueWaitHigh", "warning", _queue_wait_high),
    AlertRule("MemoryHigh", "warning", _memory_high),
    AlertRule("LinkSlow", "warning", _link_slow),
    AlertRule("VersionSkew", "warning", _version_skew),
    AlertRule("FingerprintSkew", "warning", _fingerprint_skew),
)


class Alerts:
    """Evaluates the rules, and remembers since when each alert fires. Call `evaluate` about once a second."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._since: dict[tuple[str, str], float] = {}

    def evaluate(self, now_s: float) -> list[Alert]:
        """Returns the alerts that fire now, critical ones first. An alert that fired last time keeps its `since_s`."""
        before, self._since, firing = self._since, {}, []
        for rule in ALERTS:
            for subject, summary in rule.condition(self._watch, now_s):
                since_s = before.get((rule.name, subject), now_s)
                self._since[rule.name, subject] = since_s
                firing.append(
                    Alert.of(
                        rule,
                        id=f"{rule.name}:{subject}",
                        subject=subject,
                        summary=summary,
                        since_s=since_s,
                    )
                )
        return sorted(firing, key=lambda alert: alert.severity)
