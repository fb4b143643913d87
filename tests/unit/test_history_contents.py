"""What the history returns of the runs, steps and events that were put into it."""

import asyncio
import time
from pathlib import Path

import pytest

from backhaul_proto.v1 import telemetry_pb2
from backhaul_server.dashboard.collect.sanitize import clean_report
from backhaul_server.dashboard.history import writer
from backhaul_server.dashboard.history.selection import EventSelection, RunSelection
from backhaul_server.dashboard.history.writer import History
from backhaul_server.dashboard.schemas.events import EventEntry
from conftest import wait_until
from support.histories import kept, report_of, run_of, runs, series, step_of, steps_of

pytestmark = pytest.mark.usefixtures("quick_history")


def test_a_run_is_kept_with_all_that_tells_it_apart(path: str) -> None:
    with kept(path) as history:
        started_at_s = time.time() - 100
        history.put(report_of(*(step_of(n, loss=1 / n) for n in (1, 2, 3)), run=run_of(started_at_s=started_at_s)))
        wait_until(lambda: len(runs(history)) == 1, "it is written")
        (run,) = runs(history)
    assert (run.run, run.trainer, run.client_version, run.workers) == ("run", "host:1", "0.1.0", ["a:1", "b:2"])
    assert (run.settings, run.fingerprint, run.state) == ({"returns": "auto"}, {"torch": "2.13.0"}, "running")
    assert (run.steps, run.last_step, run.median_step_ms) == (3, 3, 500)
    assert run.last_loss == pytest.approx(1 / 3)
    assert (run.peak_bytes, run.up_bytes, run.down_bytes, run.fallbacks) == (1003, 60, 6, 2)
    assert run.started_at_s == pytest.approx(started_at_s)
    assert run.heard_at_s == pytest.approx(time.time(), abs=10)


def test_the_name_and_the_costs_of_a_run_are_kept(path: str) -> None:
    run = run_of()
    run.MergeFrom(telemetry_pb2.Run(name="lora", tags=["a"], notes="none", rank=1, world_size=2))
    costs = telemetry_pb2.Step(wait_s=0.5, overhead_s=0.25, spared_s=2.0, spared_bytes=30)
    steps = [step_of(number) for number in range(1, 7)]
    for step in steps:
        step.MergeFrom(costs)
    with kept(path) as history:
        history.put(report_of(*steps, run=run))
        (stored,) = runs(history)
    assert (stored.name, stored.tags, stored.notes, stored.rank, stored.world_size) == ("lora", ["a"], "none", 1, 2)
    judged = stored.verdict
    assert (judged.added_ms, judged.spared_ms, judged.saved_bytes, stored.spared_bytes) == (750, 2000, 700, 180)
    assert "3 of the 15 recomputations meant for workers ran on the trainer" in judged.why


def test_it_survives_a_restart_and_what_stop_finds_is_written(path: str) -> None:
    with kept(path) as history:
        history.put(report_of(step_of(1)))
    with kept(path) as history:
        wait_until(lambda: steps_of(history) == [1], "the file is read")
        history.put(report_of(step_of(2), run=run_of(is_closed=True)))
        wait_until(lambda: steps_of(history) == [1, 2], "the run goes on")
        assert [run.state for run in runs(history)] == ["ended"]


def test_who_asks_gets_what_was_put_before(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "WRITE_S", 60.0)
    with kept(path) as history:
        for number in range(1, 4):
            history.put(report_of(step_of(number)))
            assert steps_of(history) == list(range(1, number + 1))


def test_a_step_told_twice_counts_once_also_by_two_dashboards(path: str) -> None:
    with kept(path) as one, kept(path) as other:
        for number in range(1, 21):
            for history in (one, other):
                history.put(report_of(step_of(number), step_of(number)))
        wait_until(lambda: steps_of(one) == list(range(1, 21)) == steps_of(other), "both see all")
        (run,) = runs(one)
        assert (run.steps, run.up_bytes) == (20, 10 * sum(range(1, 21)))
        assert (one.error, other.error) == ("", "")


def test_the_newest_runs_come_first_and_silent_ones_are_named(path: str) -> None:
    with kept(path) as history:
        now_s = time.time()
        for age_s in (300, 100, 200):
            run = run_of(f"run{age_s}", started_at_s=now_s - age_s)
            history.put(report_of(step_of(1, started_at_s=now_s - age_s), run=run))
        wait_until(lambda: len(runs(history)) == 3, "all are written")
        assert [run.run for run in runs(history)] == ["run100", "run200", "run300"]
        assert [run.run for run in runs(history, 1)] == ["run100"]
        assert {run.state for run in runs(history)} == {"silent"}


def test_runs_are_filtered_and_paged(path: str) -> None:
    now_s = time.time()
    with kept(path) as history:
        for number in range(5):
            run = run_of(f"run{number}", started_at_s=now_s - 100 + number // 2)
            run.name, run.rank, run.world_size = f"LoRA {number}", number, 5
            run.tags.extend(["even" if number % 2 == 0 else "odd", "all"])
            history.put(report_of(step_of(1), run=run))
        wait_until(lambda: len(runs(history)) == 5, "they are written")

        def listed(wanted: RunSelection) -> tuple[list[str], int]:
            page = asyncio.run(history.runs(wanted, ["run1", "unknown"]))
            assert page.stored == {"run1"}
            return [run.run for run in page.runs], page.total

        assert listed(RunSelection(2)) == (["run4", "run3"], 5)
        last = runs(history)[1]
        assert listed(RunSelection(9, before=(last.started_at_s, last.run))) == (["run2", "run1", "run0"], 5)
        assert listed(RunSelection(9, tag="odd")) == (["run3", "run1"], 2)
        assert listed(RunSelection(9, tag="od")) == ([], 0)
        assert listed(RunSelection(9, query="lora 2")) == (["run2"], 1)
        assert listed(RunSelection(9, query="ODD")) == (["run3", "run1"], 2)
        assert listed(RunSelection(9, query="HOST")) == (["run4", "run3", "run2", "run1", "run0"], 5)
        assert listed(RunSelection(9, id="run3")) == (["run3"], 1)
        (stored,) = asyncio.run(history.runs(RunSelection(1, id="run3"))).runs
        assert (stored.name, stored.tags, stored.rank, stored.world_size) == ("LoRA 3", ["odd", "all"], 3, 5)


def test_a_point_is_the_median_and_of_bytes_the_largest(path: str) -> None:
    with kept(path) as history:
        steps = [step_of(n, loss=None if n == 3 else n, duration_s=n * n / 1e3) for n in range(1, 7)]
        history.put(report_of(*steps, step_of(101, duration_s=1)))
        wait_until(lambda: series(history) is not None, "it is written")
        whole, coarse = series(history, points=1000), series(history, points=34)  # 3 numbers a point
    assert whole is not None and coarse is not None
    assert (whole.step, whole.loss) == ([1, 2, 3, 4, 5, 6, 101], [1, 2, None, 4, 5, 6, None])
    assert coarse.step == [3, 6, 101]
    assert coarse.step_ms == pytest.approx([4, 25, 1000])
    assert coarse.loss == [1.5, 5, None]
    assert (coarse.peak_bytes, coarse.moved_bytes) == ([1003, 1006, 1101], [33, 66, 1111])


def test_a_run_without_steps_has_an_empty_series_and_an_unknown_one_none(path: str) -> None:
    with kept(path) as history:
        history.put(report_of())
        wait_until(lambda: series(history) is not None, "it is written")
        assert steps_of(history) == []
        assert series(history, "other") is None
        assert runs(history)[0].median_step_ms is None


def test_a_range_of_time_has_the_steps_that_began_in_it(path: str) -> None:
    began_s = time.time() - 1_000
    numbers = [number for number in range(1, 101) if number % 10]  # some are missing
    with kept(path) as history:
        history.put(report_of(*(step_of(number, started_at_s=began_s + number) for number in numbers)))
        wait_until(lambda: len(steps_of(history)) == len(numbers), "they are written")
        for since, until in ((20.5, 40.5), (0, 5), (95, 400), (20, 20.5), (-5, -1), (200, 300)):
            within = asyncio.run(history.series("run", 1_000, began_s + since, began_s + until))
            assert within is not None
            assert within.step == [number for number in numbers if since < number <= until]
        whole = series(history)
        assert whole is not None
        assert whole.at_s == pytest.approx([began_s + number + 0.5 for number in numbers])


def test_times_of_a_trainer_whose_clock_is_compared_are_converted(path: str) -> None:
    now_s = time.time()
    report = report_of(step_of(1, started_at_s=now_s - 5_000), run=run_of(started_at_s=now_s - 5_100))
    with kept(path) as history:
        history.put(report, 4_000.0)
        wait_until(lambda: len(runs(history)) == 1, "it is written")
        (run,) = runs(history)
        whole = series(history)
    assert run.started_at_s == pytest.approx(now_s - 1_100)
    assert whole is not None
    assert whole.at_s == [pytest.approx(now_s - 999.5)]


def test_numbers_that_no_trainer_means_do_no_harm(path: str) -> None:
    nonsense = step_of(2, loss=float("nan"), started_at_s=1e300, duration_s=float("inf"))
    nonsense.number = nonsense.up_bytes = nonsense.down_bytes = nonsense.peak_bytes = 2**64 - 1
    report = report_of(step_of(1, started_at_s=-5, duration_s=float("nan")), nonsense)
    assert clean_report(report)  # as whatever a trainer reports is before it is kept
    with kept(path) as history:
        history.put(report)
        wait_until(lambda: len(runs(history)) == 1, "it is written")
        assert (history.error, runs(history)[0].steps, runs(history)[0].last_loss) == ("", 2, None)
        assert runs(history)[0].heard_at_s <= time.time()
        whole = series(history)
        assert whole is not None
        assert whole.step_ms == [0, 1e9]  # a million seconds, the longest that is taken for a duration


def event_of(name: str, at_s: float, run: str = "run") -> EventEntry:
    """A worker's loss."""
    return EventEntry(
        id=name, at_s=at_s, kind="worker_lost", run=run, worker="a:1", segment="Block", text=f"event {name}", count=2
    )


def test_events_survive_a_restart_and_are_paged_by_time(path: str) -> None:
    now_s = time.time()
    events = [event_of(f"e{number}", now_s - 50 + number // 2, run="ab"[number % 2]) for number in range(6)]
    with kept(path) as history:
        for event in (*events, *events):  # told twice
            history.put_event(event)
    with kept(path) as history:
        wait_until(lambda: asyncio.run(history.events(EventSelection(10))) is not None, "the file is read")
        page = asyncio.run(history.events(EventSelection(4)))
        assert page is not None
        assert ([event.id for event in page.events], page.total) == (["e5", "e4", "e3", "e2"], 6)
        assert page.events[0] == events[5]
        last = page.events[-1]
        rest = asyncio.run(history.events(EventSelection(4, before=(last.at_s, last.id))))
        assert rest is not None
        assert ([event.id for event in rest.events], rest.total) == (["e1", "e0"], 6)
        wanted = EventSelection(10, runs=("a",), since_s=now_s - 49.5, until_s=now_s - 47.5)
        of_run = asyncio.run(history.events(wanted))
        assert of_run is not None
        assert ([event.id for event in of_run.events], of_run.total) == (["e4", "e2"], 2)


def test_what_has_no_room_is_counted_and_nobody_waits(tmp_path: Path) -> None:
    with kept(str(tmp_path)) as history:  # a directory is no file
        steps = [step_of(number) for number in range(1000)]
        for _ in range(25):
            history.put(report_of(*steps))
        assert history.dropped_steps == 6000
        assert len(history._queued) <= writer.QUEUED_ROWS
        wait_until(lambda: "cannot be opened" in history.error, "it says so")


def test_nobody_waits_for_an_answer_of_a_history_that_does_not_run(path: str) -> None:
    history = History(path, 30)
    assert runs(history) == []
    history.start()
    history.stop()
    assert series(history) is None


@pytest.mark.slow
@pytest.mark.soak
def test_a_million_steps_stay_usable(path: str) -> None:
    with kept(path) as history:
        for begin in range(0, 1_000_000, 5000):
            wait_until(lambda: len(history._queued) < 10_000, "the queue has room")
            history.put(report_of(*(step_of(number, loss=1.0) for number in range(begin, begin + 5000))))
        wait_until(lambda: not history._queued, "all is written")
        assert history.dropped_steps == 0
        assert runs(history)[0].steps == 1_000_000
        for ask in (lambda: runs(history), lambda: series(history, points=400), lambda: series(history, points=1)):
            began_s = time.process_time()  # others use this machine too
            ask()
            assert time.process_time() - began_s < 5
        whole = series(history, points=400)
        assert whole is not None
        assert (len(whole.step), whole.step[-1], whole.peak_bytes[-1]) == (400, 999_999, 1_000_999)
