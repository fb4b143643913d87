"""The event log: what the dashboard sees itself, what trainers report, and how both are paged."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from backhaul_proto.v1 import telemetry_pb2
from backhaul_runtime.process.addresses import parse_address
from backhaul_server.dashboard.collect import event_log
from backhaul_server.dashboard.collect.durations import Tally
from backhaul_server.dashboard.collect.event_log import Burst, EventLog, of_trainer
from backhaul_server.dashboard.collect.trainers import Trainers
from backhaul_server.dashboard.collect.watched import Watched
from backhaul_server.dashboard.history.selection import EventSelection
from backhaul_server.dashboard.history.sqlite import HistoryFile, Row, event_row, report_rows
from backhaul_server.dashboard.schemas.events import EventEntry, Kind
from backhaul_server.dashboard.views.events import selected_events
from support.reporting import Training


def noted(name: str, at_s: float, kind: Kind, **more: str) -> EventEntry:
    """An entry of the log."""
    return EventEntry.model_validate({"id": name, "at_s": at_s, "kind": kind, **more})


def of_tomorrow(name: str, at_s: float, text: str = "") -> Row:
    """The row of an event of a kind that only a newer version knows."""
    statement, values = event_row(noted(name, at_s, "fell_back", run="run", worker="gpu:1", text=text))
    return statement, {**values, "kind": "of tomorrow"}


def answer(**fields: object) -> telemetry_pb2.GetTelemetryResponse:
    given = {"epoch": "one", "uptime_s": 10.0, **fields}
    return telemetry_pb2.GetTelemetryResponse(**given)  # type: ignore[arg-type]


def seen(*changes: Callable[[Watched], None]) -> list[tuple[str, str]]:
    log = EventLog()
    worker = Watched(parse_address("gpu:1"), Tally(), log)
    for change in changes:
        change(worker)
    return [(event.kind, event.text) for event in log]


def test_a_worker_that_stops_answers_again_and_was_restarted_is_noted_once_each() -> None:
    noted = seen(
        lambda worker: worker.answered(answer()),
        lambda worker: worker.failed("nothing listens at its address"),
        lambda worker: worker.failed("nothing listens at its address"),
        lambda worker: worker.answered(answer()),
        lambda worker: worker.answered(answer(epoch="two", draining=True)),
        lambda worker: worker.answered(answer(epoch="two", draining=True)),
    )
    assert noted == [
        ("worker_unreachable", "Worker gpu:1 stopped answering: nothing listens at its address"),
        ("worker_reachable", "Worker gpu:1 answers again"),
        (
            "worker_restarted",
            "Worker gpu:1 was restarted. What it held for trainers is lost, and they recompute those segments",
        ),
        ("worker_draining", "Worker gpu:1 is shutting down and takes no new segments"),
    ]


def test_a_worker_that_never_answered_is_noted_when_it_does() -> None:
    noted = seen(
        lambda worker: worker.failed("it cannot be reached"),
        lambda worker: worker.failed("it cannot be reached"),
        lambda worker: worker.failed("it cannot be reached"),
        lambda worker: worker.answered(answer()),
    )
    assert noted == [
        ("worker_unreachable", "Worker gpu:1 does not answer: it cannot be reached"),
        ("worker_reachable", "Worker gpu:1 answers"),
    ]


def test_a_single_late_answer_is_no_event() -> None:
    noted = seen(
        lambda worker: worker.answered(answer()),
        lambda worker: worker.failed("it did not answer in time"),
        lambda worker: worker.answered(answer()),
    )
    assert noted == []


def test_a_burst_is_one_event_at_once_and_one_a_minute() -> None:
    burst = Burst()
    assert burst.grew(0.0, 0) == 0
    assert [burst.grew(100.0, 3), burst.grew(101.0, 4), burst.grew(159.0, 0)] == [3, 0, 0]
    assert burst.grew(160.0, 1) == 5
    assert burst.grew(400.0, 0) == 0
    assert burst.grew(401.0, 2) == 2
    assert burst.grew(-3_200.0, 3) == 3  # the clock was set back by an hour
    assert burst.grew(-3_199.0, 3) == 0


def test_refusals_and_evictions_are_counted() -> None:
    log = EventLog()
    worker = Watched(parse_address("gpu:1"), Tally(), log)
    worker.answered(answer(memory=telemetry_pb2.MemoryTelemetry(refusals=1)))
    worker.answered(answer(memory=telemetry_pb2.MemoryTelemetry(refusals=3, evictions=2)))
    assert [(event.kind, event.count) for event in log] == [("evictions", 2), ("refusals", 2)]
    assert log.counts == {"evictions": 2, "refusals": 2}


def test_runs_begin_and_end_once() -> None:
    log, training = EventLog(), Training(began_at_s=time.time() - 10)
    for _ in range(2):  # as a dashboard that was restarted, which the worker tells everything again
        trainers = Trainers(log)
        for report in (training.report([0]), training.report([1], is_closed=True)):
            trainers.take(report, time.time(), 0.0)
    began, ended = log
    assert (began.kind, began.id) == ("run_began", f"{training.run}-began")
    assert (ended.kind, ended.text) == ("run_ended", f"Run {training.run} ended after 2 steps")


def test_a_run_that_began_before_the_dashboard_ends_after_all_of_its_steps() -> None:
    log = EventLog()
    trainers, training = Trainers(log), Training(began_at_s=time.time() - 60)
    report = training.report([998, 999])
    trainers.take(report, time.time(), 0.0)
    report.run.is_closed = True
    trainers.take(report, time.time(), 0.0)
    assert [event.text for event in log if event.kind == "run_ended"] == [f"Run {training.run} ended after 1,000 steps"]


def test_a_trainers_events_keep_their_ids_and_kinds_of_newer_trainers_are_left_out() -> None:
    reported = telemetry_pb2.Event(kind="worker_lost", worker="gpu:1", text="gone", number=7)
    event = of_trainer("run", reported, 50.0)
    assert event == noted("run-7", 50.0, "worker_lost", run="run", worker="gpu:1", text="gone")
    assert event is not None
    assert event.severity == "warning"
    assert of_trainer("run", telemetry_pb2.Event(kind="of tomorrow"), 50.0) is None


def test_the_log_is_bounded_and_forgets_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "MOST", 3)
    kept: list[EventEntry] = []
    log = EventLog(kept.append)
    for number in [0, 1, 1, 2, 3]:
        log.add(noted(str(number), number, "worker_lost"))
    assert [event.id for event in log] == ["1", "2", "3"]
    assert [event.id for event in kept] == ["0", "1", "2", "3"]


def test_pages_of_events_are_the_newest_first_and_join() -> None:
    log = [noted(str(number), number // 2, "worker_lost", run="ab"[number % 2]) for number in range(6)]
    log.append(noted("of no run", 1.0, "worker_reachable"))
    wanted = EventSelection(2, runs=("a",), since_s=1.0)
    page = selected_events(log, wanted)
    assert ([event.id for event in page.events], page.total) == (["4", "of no run"], 3)
    last = page.events[-1]
    following = selected_events(log, EventSelection(2, runs=("a",), since_s=1.0, before=(last.at_s, last.id)))
    assert ([event.id for event in following.events], following.total) == (["2"], 3)


@pytest.mark.parametrize(
    ("wanted", "ids"),
    [
        (EventSelection(9, severity="warning"), "20"),
        (EventSelection(9, severity="critical"), "2"),
        (EventSelection(9, text="FALLBACK"), "0"),
        (EventSelection(9, text="answers again"), "1"),
        (EventSelection(9, text="gpu:1"), "210"),
        (EventSelection(9, text="lora rank 3"), "0"),
        (EventSelection(9, text="block.7"), "0"),
        (EventSelection(9, runs=("run", "other")), "3210"),
        (EventSelection(9, runs=("other",)), "321"),
        (EventSelection(9, severity="warning", text="nothing"), ""),
    ],
)
def test_events_are_filtered_by_severity_and_text_in_memory_as_in_the_file(
    tmp_path: Path, wanted: EventSelection, ids: str
) -> None:
    log = [
        noted("0", 0.0, "fell_back", run="run", worker="gpu:1", segment="Block.7", text="the worker was busy"),
        noted("1", 1.0, "worker_reachable", worker="gpu:1", text="Worker gpu:1 is there"),
        noted("2", 2.0, "worker_unreachable", worker="gpu:1", text="Worker gpu:1 is gone"),
        noted("3", 3.0, "run_began", run="other", text="began"),
    ]
    page = selected_events(log, wanted, lambda run: "LoRA rank 3" if run == "run" else "")
    assert "".join(event.id for event in page.events) == ids
    assert page.total == len(ids)
    file = HistoryFile(str(tmp_path / "history.sqlite3"))
    try:
        run = telemetry_pb2.Run(id="run", name="LoRA", rank=3, world_size=4)
        report = report_rows(telemetry_pb2.TrainerReport(run=run), 10.0)
        file.write([*report, of_tomorrow("x", 1.5, "fallback lora rank 3"), *map(event_row, log)])
        assert file.events(wanted) == page
    finally:
        file.close()


def test_kinds_of_a_newer_version_do_not_end_the_pages(tmp_path: Path) -> None:
    file = HistoryFile(str(tmp_path / "history.sqlite3"))
    try:
        log = [noted(str(number), number, "worker_lost") for number in range(4)]
        file.write([*map(event_row, log), *(of_tomorrow(f"n{number}", number + 0.5) for number in range(4))])
        page = file.events(EventSelection(3))
        assert ([event.id for event in page.events], page.total) == (["3", "2", "1"], 4)
    finally:
        file.close()
