"""What a trainer reports beside its steps: events, links, its rank, and what people call the run."""

from typing import Any

import pytest
import torch.distributed as dist

from backhaul._config import Config, Settings, resolve
from backhaul._observe import run_events, telemetry
from backhaul._observe.call_log import CallLog
from backhaul._observe.journal import SegmentLog
from backhaul._observe.ranks import rank_and_world
from backhaul._observe.report import Decision
from backhaul._observe.run_events import EVENTS_PER_REPORT, MAX_KINDS, RunEvents
from backhaul._observe.telemetry import Telemetry
from backhaul._worker_client.connection.link_traffic import LinkTraffic
from backhaul_proto.v1 import telemetry_pb2
from backhaul_proto.v1.segment_pb2 import Timing
from backhaul_proto.v1.telemetry_pb2 import Lane
from backhaul_runtime.errors import SettingError
from backhaul_runtime.tensors.durations import wait_s
from conftest import wait_until
from unit.test_telemetry import Reporter


class Clock:
    """A monotonic clock that a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1_000.0
        monkeypatch.setattr(run_events, "monotonic", lambda: self.now_s)


def test_equal_events_are_counted_together_and_told_once_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, noted = Clock(monkeypatch), RunEvents()
    for _ in range(3):
        noted.add("fell_back", "it ran here", worker="a:1", segment="Block")
    noted.add("worker_lost", "a:1 was lost", worker="a:1")
    fell_back, lost = noted.take()
    assert (fell_back.kind, fell_back.count, fell_back.number, fell_back.segment) == ("fell_back", 3, 0, "Block")
    assert (lost.kind, lost.count, lost.number) == ("worker_lost", 1, 1)
    noted.add("fell_back", "it ran here", worker="a:1", segment="Block")
    noted.add("fell_back", "it ran here", worker="a:1", segment="Head")
    (other,) = noted.take()
    assert (other.segment, other.number) == ("Head", 2)
    clock.now_s += run_events.QUIET_S
    (again,) = noted.take()
    assert (again.segment, again.count, again.number) == ("Block", 1, 3)
    assert noted.take() == []


def test_the_last_report_has_what_was_only_counted() -> None:
    noted = RunEvents()
    for _ in range(2):
        noted.add("fell_back", "it ran here")
        events_now = noted.take()
    assert events_now == []
    assert [event.count for event in noted.take(is_last=True)] == [1]


def test_events_are_bounded() -> None:
    noted = RunEvents()
    for number in range(2 * MAX_KINDS):
        noted.add("fell_back", f"for reason {number}")
    first = noted.take()
    assert len(first) == EVENTS_PER_REPORT
    rest = [event for _ in range(20) for event in noted.take()]
    texts = {event.text for event in (*first, *rest)}
    assert texts == {f"for reason {number}" for number in range(MAX_KINDS, 2 * MAX_KINDS)}


def test_a_report_has_links_events_and_what_differences_spared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    reporter = Reporter(links=[telemetry_pb2.Link(worker="a:1", up_bytes=7), telemetry_pb2.Link(worker="b:2")])
    call = CallLog(SegmentLog("Block"), reporter.telemetry)
    call.worker = "a:1"
    call.spared(500)
    call.fallback("the worker is gone")
    call.add(Decision.TRAINER, 0.1)
    refused = CallLog(SegmentLog("Head"), reporter.telemetry)
    refused.fallback("no room", is_refusal=True)
    reporter.telemetry.step()
    (report,) = reporter.close()
    assert [link.worker for link in report.links] == ["a:1", "b:2"]
    assert report.sent_at_s > 0
    assert (report.run.rank, report.run.world_size, report.steps[0].spared_bytes) == (1, 4, 500)
    assert [(event.kind, event.worker, event.segment, event.text) for event in report.events] == [
        ("fell_back", "a:1", "Block", "Segment Block ran on the trainer: the worker is gone"),
        ("refused", "", "Head", "Segment Head was refused by its worker: no room"),
    ]


@pytest.mark.parametrize("does_raise", [False, True])
def test_an_event_whose_report_does_not_arrive_is_told_again(
    monkeypatch: pytest.MonkeyPatch, *, does_raise: bool
) -> None:
    monkeypatch.setattr(telemetry, "INTERVAL_S", 0.01)
    attempts: list[list[tuple[int, str, int]]] = []

    def deliver(report: telemetry_pb2.TrainerReport) -> bool:
        attempts.append([(event.number, event.kind, event.count) for event in report.events])
        if len(attempts) < 3 and does_raise:
            raise OSError("no worker is left")
        return len(attempts) >= 3

    reporter = Telemetry(deliver, telemetry_pb2.Run(id="run"))
    reporter.events.add("worker_lost", "a:1 was lost")
    reporter.start()
    wait_until(lambda: len(attempts) >= 3, "it is told until it has arrived")
    reporter.close()
    assert attempts[:3] == [[(0, "worker_lost", 1)]] * 3
    assert attempts[-1] == []  # the last report, after it has arrived


def test_events_that_wait_for_a_worker_are_bounded() -> None:
    noted = RunEvents()
    for number in range(3 * MAX_KINDS):
        noted.add("fell_back", f"for reason {number}")
        noted.give_back(noted.take())
    noted.add("worker_back", "the worker is back")
    left = [event for _ in range(20) for event in noted.take()]
    assert len(left) <= MAX_KINDS + EVENTS_PER_REPORT
    assert left[-1].kind == "worker_back"


def test_an_event_is_told_without_any_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "INTERVAL_S", 0.01)
    reporter = Reporter()
    reporter.telemetry.events.add("worker_lost", "a:1 was lost")
    reporter.telemetry.start()
    wait_until(lambda: bool(reporter.reports), "the event is told")
    reporter.telemetry.close()
    assert ([event.kind for event in reporter.reports[0].events], reporter.reports[0].run.is_closed) == (
        ["worker_lost"],
        False,
    )


def test_an_answer_that_contradicts_the_clocks_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    reporter = Reporter()
    monkeypatch.setattr("backhaul._observe.call_log.time", lambda: 100.0)
    call = CallLog(SegmentLog("Block"), reporter.telemetry)
    timing = Timing(queued_at_s=1_000.0, requested_at_s=1_000.0, recompute_at_s=1_001.0, recompute_s=2.0)
    # By an offset of 902 s the worker would have been done at 101 s, a second after its answer arrived.
    call.answered(timing, clock_offset_s=902.0)
    spans = {lane: (began_at_s, began_at_s + wait_s(took)) for lane, began_at_s, took in call.spans}
    assert spans[Lane.LANE_RECOMPUTE] == (98.0, 100.0)
    assert Lane.LANE_DOWNLOAD not in spans
    call.spans.clear()
    call.answered(timing, clock_offset_s=904.0)  # which fits: it was done at 99 s
    spans = {lane: (began_at_s, began_at_s + wait_s(took)) for lane, began_at_s, took in call.spans}
    assert (spans[Lane.LANE_RECOMPUTE], spans[Lane.LANE_DOWNLOAD]) == ((97.0, 99.0), (99.0, 100.0))


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (0, 0)),
        ({"RANK": "2", "WORLD_SIZE": "8"}, (2, 8)),
        ({"RANK": "2"}, (0, 0)),
        ({"RANK": "two", "WORLD_SIZE": "8"}, (0, 0)),
        ({"RANK": "8", "WORLD_SIZE": "8"}, (0, 0)),
        ({"RANK": "-1", "WORLD_SIZE": "8"}, (0, 0)),
    ],
)
def test_the_rank_is_that_of_torchruns_environment(environment: dict[str, str], expected: tuple[int, int]) -> None:
    assert rank_and_world(environment) == expected


def test_a_process_group_goes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    monkeypatch.setattr(dist, "get_world_size", lambda: 5)
    assert rank_and_world({"RANK": "0", "WORLD_SIZE": "2"}) == (3, 5)


def test_traffic_is_counted_in_both_directions() -> None:
    traffic = LinkTraffic()
    traffic.add(up_bytes=3)
    traffic.add(up_bytes=4, down_bytes=5)
    traffic.forked()
    assert traffic.totals == (7, 5)


def test_a_run_is_described_by_arguments_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BACKHAUL_RUN", "of the environment")
    monkeypatch.setenv("BACKHAUL_TAGS", "lora, 32k")
    monkeypatch.setenv("BACKHAUL_NOTES", "rank 16, one epoch")
    config = resolve(run="lora-32k")
    assert (config.run, config.tags, config.notes) == ("lora-32k", ("lora", "32k"), "rank 16, one epoch")
    assert resolve(Settings(tags=["a", "b"])).tags == ("a", "b")
    assert resolve(Settings(tags="a,b")).tags == ("a", "b")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"run": "x" * 101}, "run=.* has 101 characters, and may have 100"),
        ({"notes": "x" * 2_001}, "notes=.* has 2001 characters, and may have 2000"),
        ({"tags": ["a"] * 17}, "tags=.* has 17 items, and may have 16"),
        ({"tags": ["x" * 41]}, "a text of 1 to 40 characters"),
        ({"tags": [""]}, "a text of 1 to 40 characters"),
        ({"tags": [3]}, "tags=.* has 3, which must be a text"),
        ({"tags": 3}, "tags=3 must be of type tuple"),
        ({"run": 3}, "run=3 must be of type str"),
    ],
)
def test_a_description_that_is_too_long_or_no_text_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        Config(**given)
