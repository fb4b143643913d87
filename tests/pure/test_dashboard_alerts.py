"""Alerts: each holds where it should, and nowhere else."""

import re
from collections.abc import Callable

import pytest

from backhaul_proto.v1 import telemetry_pb2
from backhaul_proto.v1.telemetry_pb2 import Lane
from backhaul_runtime.process.discovery import parse_resolvers
from backhaul_server.dashboard.collect.watch import Watch
from backhaul_server.dashboard.metrics.alerts import ALERTS, Alerts
from support.reporting import Training

GIB = 1 << 30
RUN = "9f86d081884c7d65"


class Scene:
    """Two workers and a run on both, all well. Tests spoil it."""

    def __init__(self) -> None:
        self.watch = Watch(parse_resolvers("a:1,b:2"))
        self.training = Training(run=RUN, segments=10)
        for worker in self.watch.workers:
            worker.answered(self.telemetry())
        self.now_s = self.watch.workers[0].answered_at_s
        self.tell(self.training.report([0]))

    def telemetry(self, **changed: object) -> telemetry_pb2.GetTelemetryResponse:
        return telemetry_pb2.GetTelemetryResponse(
            **{  # type: ignore[arg-type]
                "worker_version": "0.1.0",
                "memory": telemetry_pb2.MemoryTelemetry(
                    budget_bytes=10 * GIB, segment_bytes=3 * GIB, cached_bytes=6 * GIB
                ),
                "fingerprint": {"torch": "2.13.0", "cpu": "AVX512"},
                "sessions": [telemetry_pb2.SessionTelemetry(run=RUN, trainer="t", client_version="0.1.0")],
                **changed,
            }
        )

    def tell(self, report: telemetry_pb2.TrainerReport) -> None:
        self.watch.trainers.take(report, self.now_s, self.now_s - 10)


def unreachable(scene: Scene) -> None:
    scene.watch.workers[1].failed("UNAVAILABLE: connection refused")


def fallbacks(scene: Scene) -> None:
    report = scene.training.report([1])
    report.steps[0].gradients, report.steps[0].on_trainer, report.steps[0].fallbacks = 9, 1, 1
    scene.tell(report)


def queue(scene: Scene) -> None:
    report = scene.training.report([1])
    for call in report.calls:
        recompute = next(span for span in call.spans if span.lane == Lane.LANE_RECOMPUTE)
        for lane in (Lane.LANE_QUEUE, Lane.LANE_WAIT):
            call.spans.add(lane=lane, started_at_s=recompute.started_at_s - 9, duration_s=4 * recompute.duration_s)
    scene.tell(report)


def memory(scene: Scene) -> None:
    full = telemetry_pb2.MemoryTelemetry(budget_bytes=10 * GIB, segment_bytes=7 * GIB, working_bytes=int(1.1 * GIB))
    scene.watch.workers[1].answered(scene.telemetry(memory=full))


def link(scene: Scene) -> None:
    report = scene.training.report([1])
    for call in report.calls:
        next(span for span in call.spans if span.lane == Lane.LANE_UPLOAD).duration_s *= 10
    scene.tell(report)


def versions(scene: Scene) -> None:
    scene.watch.workers[1].answered(scene.telemetry(worker_version="0.2.0"))


def fingerprints(scene: Scene) -> None:
    scene.watch.workers[1].answered(scene.telemetry(fingerprint={"torch": "2.13.0", "cpu": "AVX2"}))


CASES: dict[str, tuple[Callable[[Scene], None], str, str]] = {
    "WorkerUnreachable": (unreachable, "b:2", "connection refused"),
    "FallbackRateHigh": (fallbacks, RUN, "5 % of the recomputations"),
    "QueueWaitHigh": (queue, RUN, "in a worker's queue"),
    "MemoryHigh": (memory, "b:2", "used 81 % of its memory"),
    "LinkSlow": (link, RUN, "to send and fetch"),
    "VersionSkew": (versions, "b:2", "0.2.0"),
    "FingerprintSkew": (fingerprints, RUN, "differ in cpu"),
}


def test_nothing_is_said_where_all_is_well() -> None:
    scene = Scene()
    assert Alerts(scene.watch).evaluate(scene.now_s) == []


def test_every_alert_has_a_case() -> None:
    assert set(CASES) == {rule.name for rule in ALERTS}


@pytest.mark.parametrize("name", CASES)
def test_an_alert_holds_where_it_should(name: str) -> None:
    spoil, subject, says = CASES[name]
    scene = Scene()
    spoil(scene)
    alerts = Alerts(scene.watch)
    (alert,) = alerts.evaluate(scene.now_s)
    assert (alert.name, alert.subject, alert.since_s) == (name, subject, scene.now_s)
    assert says in alert.summary
    assert re.search(r"\d%|\.0 %", alert.summary) is None
    (again,) = alerts.evaluate(scene.now_s + 1)
    assert again.since_s == scene.now_s


def test_alerts_of_a_run_that_ended_are_over() -> None:
    scene = Scene()
    fallbacks(scene)
    alerts = Alerts(scene.watch)
    assert [alert.name for alert in alerts.evaluate(scene.now_s)] == ["FallbackRateHigh"]
    scene.tell(scene.training.report([], is_closed=True))
    assert alerts.evaluate(scene.now_s) == []


def test_critical_ones_come_first() -> None:
    scene = Scene()
    memory(scene)
    fallbacks(scene)
    assert [alert.severity for alert in Alerts(scene.watch).evaluate(scene.now_s)] == ["critical", "warning"]
