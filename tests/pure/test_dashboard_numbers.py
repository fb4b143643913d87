"""What the dashboard's numbers are made of: series, durations, intervals, runs, the headline."""

import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backhaul_proto.v1 import telemetry_pb2
from backhaul_runtime.process.discovery import parse_resolvers
from backhaul_runtime.wire.telemetry import BOUNDS_S, bucket_of
from backhaul_server.dashboard.collect.durations import Durations, Tally
from backhaul_server.dashboard.collect.intervals import common, length, rows_of, union
from backhaul_server.dashboard.collect.segments import REASONS, SegmentTable, reasons_of, select
from backhaul_server.dashboard.collect.series import Series
from backhaul_server.dashboard.collect.trainers import DETAILED_RUNS, Trainers
from backhaul_server.dashboard.collect.training_runs import STEPS
from backhaul_server.dashboard.collect.watch import Watch
from backhaul_server.dashboard.schemas.segments import SegmentStatus
from backhaul_server.dashboard.views.memory import memory_history
from backhaul_server.dashboard.views.overview import overview
from backhaul_server.dashboard.views.ranges import TimeRange
from backhaul_server.dashboard.views.timeline import SHOWN_BARS, timeline
from support.reporting import Training

NOW_S = 1_763_769_600.0
INTERVALS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)).map(lambda p: (p[0], p[0] + p[1])), max_size=20)


def test_a_series_keeps_the_last_rows() -> None:
    series = Series(10, 2)
    for number in range(1_000):
        series.append(float(number), (number, -number))
    assert 10 <= len(series.at_s) <= 10 + 256
    assert (series.at_s[-1], series.columns[0][-1], series.columns[1][-1]) == (999, 999, -999)
    assert series.sums(990) == [sum(range(990, 1_000)), -sum(range(990, 1_000))]


def test_a_series_stays_in_order_where_a_clock_is_set_back() -> None:
    series = Series(10, 1)
    for at_s in (5.0, 3.0, 7.0):
        series.append(at_s, [1])
    assert list(series.at_s) == [5.0, 5.0, 7.0]
    series.add(7.9, [1])
    series.add(6.0, [1])
    assert series.columns[0].tolist() == [1, 1, 3]


def rpc(durations_s: list[float], method: str = "Backward", errors: int = 0) -> telemetry_pb2.RpcTelemetry:
    buckets = [0] * (len(BOUNDS_S) + 1)
    for duration_s in durations_s:
        buckets[bucket_of(duration_s)] += 1
    return telemetry_pb2.RpcTelemetry(method=method, buckets=buckets, errors=errors)


@given(st.lists(st.floats(1.2e-4, 80), min_size=1, max_size=50), st.sampled_from([0.5, 0.9, 0.99]))
def test_percentiles_are_right_to_within_a_fifth(durations_s: list[float], share: float) -> None:
    durations = Durations(Tally())
    durations.take(NOW_S, [])
    durations.take(NOW_S, [rpc(durations_s)])
    estimated = durations.tally.counted(NOW_S - 1)["Backward"].percentile(share)
    ordered = sorted(durations_s)
    exact = next(d for i, d in enumerate(ordered, 1) if i >= share * len(ordered))
    assert estimated is not None
    assert exact / 1.2 <= estimated <= exact * 1.2


def test_calls_are_counted_in_their_second_and_for_all_workers() -> None:
    of_all = Tally()
    one, other = Durations(of_all), Durations(of_all)
    for durations in (one, other):
        durations.take(NOW_S, [rpc([0.01] * 100)])  # before anybody looked
    one.take(NOW_S + 1, [rpc([0.01] * 103, errors=1)])
    other.take(NOW_S + 2, [rpc([0.01] * 100 + [200.0])])
    one.restarted()
    one.take(NOW_S + 3, [rpc([0.01] * 2)])
    assert one.tally.counted(NOW_S)["Backward"].calls == 5
    assert of_all.counted(NOW_S)["Backward"].calls == 6
    assert of_all.counted(NOW_S + 2)["Backward"].calls == 3
    assert of_all.counted(NOW_S)["Backward"].errors == 1
    assert of_all.counted(NOW_S)["Backward"].percentile(1.0) == BOUNDS_S[-1]
    assert of_all.counted(NOW_S + 4)["Backward"].percentile(0.5) is None


@given(INTERVALS, INTERVALS)
def test_intervals_add_up(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> None:
    def points(intervals: list[tuple[int, int]]) -> set[int]:
        return {second for begin, end in intervals for second in range(begin, end)}

    assert length(union(one)) == len(points(one))
    assert common(union(one), union(other)) == len(points(one) & points(other))
    assert all(before[1] < after[0] for before, after in pairwise(union(one)))


@given(INTERVALS)
def test_rows_hold_what_does_not_overlap_and_are_as_few_as_can_be(intervals: list[tuple[int, int]]) -> None:
    intervals.sort()
    rows = rows_of(intervals)
    for row in set(rows):
        mine = [interval for interval, its in zip(intervals, rows, strict=True) if its == row]
        assert all(before[1] <= after[0] for before, after in pairwise(mine))
    most = max((sum(b <= at < e for b, e in intervals) for at in range(71)), default=0)
    assert len(set(rows)) <= max(most, 1) or any(b == e for b, e in intervals)


def test_a_run_that_nobody_hears_from_is_silent_and_then_lost() -> None:
    trainers = Trainers()
    trainers.take(Training(run="r", began_at_s=NOW_S).report([0]), NOW_S, since_s=0.0)
    (run,) = trainers
    assert [run.state(NOW_S + passed_s) for passed_s in (1, 31, 299, 301)] == ["running", "silent", "silent", "lost"]
    trainers.take(Training(run="r", began_at_s=NOW_S).report([1], is_closed=True), NOW_S, since_s=0.0)
    assert run.state(NOW_S + 301) == "ended"


def test_a_run_is_silent_as_soon_as_none_of_its_workers_answers() -> None:
    watch = Watch(parse_resolvers("a:1,b:2,c:3"))
    watch.trainers.take(Training(run="r", workers=["a:1", "b:2"], began_at_s=NOW_S).report(), NOW_S, since_s=0.0)
    (run,) = watch.trainers
    states = []
    for answering in ("abc", "bc", "c", "abc"):
        for worker in watch.workers:
            if worker.address.text[0] in answering:
                worker.answered(telemetry_pb2.GetTelemetryResponse())
            else:
                worker.failed("it did not answer in time")
        watch.note_cut_off()
        states.append(run.state(NOW_S))
    assert states == ["running", "running", "silent", "running"]


def test_old_reports_count_when_they_happened_and_new_ones_when_they_come() -> None:
    late, ahead = Trainers(), Trainers()
    for trainers, began_at_s in ((late, NOW_S - 3_600), (ahead, NOW_S + 3_600)):
        trainers.take(Training(run="r", began_at_s=began_at_s).report(range(5)), NOW_S, since_s=0.0)
    (run,) = late
    assert (run.steps, run.recent.since(NOW_S - 300).steps) == (5, 0)
    assert run.state(NOW_S) == "lost"
    # The worker was asked a second ago, so the trainer's clock is an hour behind.
    late.take(Training(run="r", began_at_s=NOW_S - 3_600).report(range(5, 8)), NOW_S, since_s=NOW_S - 11)
    assert run.recent.since(NOW_S - 300).steps == 3
    assert run.state(NOW_S) == "running"
    (run,) = ahead
    assert (run.heard_at_s, run.recent.since(NOW_S - 1).steps) == (NOW_S, 5)


def test_what_is_told_twice_counts_once_and_what_comes_too_late_not_at_all() -> None:
    trainers, training = Trainers(), Training(segments=2)
    for steps in ([3], [3, 4], [4], range(5, STEPS + 10), [3], [0]):
        trainers.take(training.report(steps), time.time(), 0.0)
    (run,) = trainers
    counted = STEPS + 10 - 3
    assert (run.steps, run.totals.steps, run.totals.calls) == (counted, counted, 2 * counted)
    assert run.totals.up_bytes == counted * training.step(0).up_bytes
    assert trainers.totals == run.totals
    assert min(run.reported_steps) == 10


def test_a_run_that_ended_gives_way_to_one_that_begins() -> None:
    trainers = Trainers()
    for number in range(DETAILED_RUNS + 2):
        report = Training(run=f"run-{number}", began_at_s=NOW_S - 60).report([0])
        trainers.take(report, NOW_S + number, NOW_S)
    detailed = {run.id for run in trainers if run.detail is not None}
    assert detailed == {f"run-{number}" for number in range(DETAILED_RUNS)}
    trainers.take(Training(run="run-3").report([1], is_closed=True), NOW_S, NOW_S)
    trainers.take(Training(run="run-9", began_at_s=NOW_S - 60).report([1]), NOW_S + 10, NOW_S)
    assert {run.id for run in trainers if run.detail is not None} == detailed - {"run-3"} | {"run-9"}
    ended = trainers.find("run-3")
    assert ended is not None
    assert (ended.calls_bytes, ended.steps) == (0, 2)


def watching(*reports: telemetry_pb2.TrainerReport) -> Watch:
    watch = Watch(parse_resolvers("a:1,b:2"))
    for report in reports:
        watch.trainers.take(report, NOW_S, NOW_S - 20)
    return watch


def answered(watch: Watch) -> Watch:
    watch.workers[0].answered(telemetry_pb2.GetTelemetryResponse(epoch="e"))
    return watch


def test_the_headline_adds_up() -> None:
    training = Training(segments=4, began_at_s=NOW_S - 10, step_s=0.5)
    report = training.report(range(20))
    for step in report.steps[-5:]:
        step.gradients, step.on_trainer, step.fallbacks = 2, 2, 1
    headline = overview(answered(watching(report)), NOW_S, "the disk is full")
    assert headline.steps_per_s == pytest.approx(20 / 9.5, rel=0.1)
    assert headline.wait_ms_per_step == pytest.approx(50)
    assert headline.overhead_ms_per_step == pytest.approx(10)
    assert headline.spared_ms_per_step == pytest.approx(150)
    assert headline.added_ms_per_step == pytest.approx(-90)
    assert headline.fallbacks == 5
    assert headline.remote_share == pytest.approx(70 / 80)
    assert (headline.saved_bytes, headline.peak_saved_bytes) == (120_000_000, 124_000_000)
    assert (headline.workers, headline.healthy_workers, headline.history) == (2, 1, "the disk is full")


UNSTEPPED = ("saved_bytes", "peak_saved_bytes", "added_ms_per_step", "wait_ms_per_step", "remote_share")
UNHEARD = ("sessions", "steps_per_s", "fallbacks")


def test_a_headline_knows_nothing_before_it_is_told() -> None:
    headline = overview(watching(), NOW_S, "")
    assert {getattr(headline, name) for name in (*UNSTEPPED, *UNHEARD, "heard_at_s", "stepped_at_s")} == {None}


def test_a_headline_with_workers_and_no_trainer() -> None:
    headline = overview(answered(watching()), NOW_S, "")
    assert [getattr(headline, name) for name in UNHEARD] == [0, 0, 0]
    assert {getattr(headline, name) for name in UNSTEPPED} == {None}
    assert headline.heard_at_s is not None


def test_what_is_no_longer_known_says_how_old_the_last_of_it_is() -> None:
    training = Training(segments=4, began_at_s=NOW_S - 10, step_s=0.5)
    watch = answered(watching(training.report(range(20))))
    assert overview(watch, NOW_S + 30, "").added_ms_per_step is not None
    headline = overview(watch, NOW_S + 400, "")
    assert {getattr(headline, name) for name in UNSTEPPED} == {None}
    assert headline.stepped_at_s == pytest.approx(NOW_S)
    assert (headline.steps_per_s, headline.fallbacks) == (0, 0)
    watch.workers[0].failed("UNAVAILABLE: gone")
    headline = overview(watch, NOW_S + 400, "")
    assert {getattr(headline, name) for name in UNHEARD} == {None}
    assert headline.heard_at_s == watch.workers[0].answered_at_s


def test_the_newest_run_is_the_one_that_began_last_whoever_told_something_last() -> None:
    trainers = Trainers()
    runs = {
        name: Training(run=name, began_at_s=began_at_s) for name, began_at_s in (("b", NOW_S - 9), ("a", NOW_S - 5))
    }
    for number in range(4):
        for training in runs.values():
            trainers.take(training.report([number]), NOW_S + number, NOW_S)
            newest = trainers.newest()
            assert newest is not None
            assert newest.id == ("b" if "a" not in {run.id for run in trainers} else "a")
    ahead = Training(run="ahead", began_at_s=NOW_S + 1e6)  # by its own clock
    trainers.take(ahead.report([0]), NOW_S + 10, NOW_S)
    trainers.take(Training(run="last", began_at_s=NOW_S + 11).report([0]), NOW_S + 11, NOW_S)
    assert [run.id for run in trainers if run is trainers.newest()] == ["last"]


def test_a_point_of_memory_is_the_largest_of_what_it_stands_for() -> None:
    watch = watching()
    worker = watch.workers[0]
    for second in range(100):
        spike = 1_000 if second in {57, 58} else 0
        worker.memory.append(NOW_S - 100 + second, (10, 20, spike, spike // 2))
    history = memory_history(watch, TimeRange(NOW_S - 100, NOW_S), points=10).workers[0]
    assert 10 <= len(history.at_s) <= 11
    assert sorted(history.working_bytes)[-2:] == [0, 1_000]
    assert [r for w, r in zip(history.working_bytes, history.result_bytes, strict=True) if w] == [500]
    assert len(memory_history(watch, TimeRange(NOW_S - 10, NOW_S), points=1_000).workers[0].at_s) == 10


def test_a_row_of_the_table_is_of_its_last_calls() -> None:
    table, training = SegmentTable("r", lambda: True), Training(segments=1)
    lanes_s = [0.0] * 9
    for took_s in [9.0] * 5 + [0.002] * 9:
        lanes_s[telemetry_pb2.LANE_FORWARD] = took_s
        table.take(training.call(0, 0, retries=1, drift=took_s), lanes_s, NOW_S)
    (row,) = select([table], "", "segment", descending=False)
    assert (row.calls, row.retries, row.drift, row.local_ms) == (14, 14, 9.0, 2.0)
    assert select([table], "nothing like it", "segment", descending=False) == []


def test_a_row_keeps_every_reason_whatever_comes_later() -> None:
    table, training = SegmentTable("r", lambda: True), Training(segments=1)

    def take(at_s: float, **changed: object) -> None:
        table.take(training.call(0, 0, **changed), [0.0] * 9, NOW_S + at_s)

    gone = {"decision": "trainer", "reason": "the worker is gone", "is_fallback": True}
    take(1, **gone)
    take(3, **gone)
    take(4, decision="activations", reason="held elsewhere")
    take(5, decision="kept", reason="a custom autograd function")
    for at_s in range(6, 9):
        take(at_s)
    (row,) = select([table], "", "segment", descending=False)
    assert (row.decision, row.reason, row.fallbacks) == ("gradients", "no output is used elsewhere", 2)
    assert [(reason.reason, reason.decision, reason.calls, reason.last_at_s - NOW_S) for reason in row.reasons] == [
        ("a custom autograd function", "kept", 1, 5),
        ("held elsewhere", "activations", 1, 4),
        ("the worker is gone", "trainer", 2, 3),
    ]
    assert select([table], "WORKER IS", "segment", descending=False) == [row]
    assert select([table], "", "segment", descending=False, reason="the worker is gone") == [row]
    assert select([table], "", "segment", descending=False, reason="the worker") == []
    for number in range(REASONS):
        take(9 + number, decision="trainer", reason=f"reason {number}")
    assert [reason.reason for reason in row.reasons] == [f"reason {number}" for number in reversed(range(REASONS))]


def test_reasons_of_all_rows_are_added_up() -> None:
    training = Training(segments=2)
    tables = [SegmentTable(run, lambda: True) for run in "rs"]
    for at_s, table in enumerate(tables):
        for number in range(2):
            table.take(training.call(0, number, decision="trainer", reason="gone"), [0.0] * 9, NOW_S + at_s)
    tables[0].take(training.call(0, 0, decision="trainer", reason="full", is_fallback=True), [0.0] * 9, NOW_S)
    gone, full = reasons_of(tables)
    assert (gone.reason, gone.calls, gone.last_at_s) == ("gone", 4, NOW_S + 1)
    assert (full.reason, full.calls, full.is_fallback) == ("full", 1, True)
    assert next(iter(tables[0])).reasons[0].calls == 1


def test_a_timeline_shows_the_longest_bars_and_only_the_calls_they_are_of() -> None:
    training, trainers = Training(segments=SHOWN_BARS // 4, began_at_s=NOW_S), Trainers()
    trainers.take(training.report(), NOW_S + 1, 0.0)
    run = trainers.find(training.run)
    assert run is not None
    drawn = timeline([(run, None)], 1)
    assert len(drawn.spans) == SHOWN_BARS
    assert drawn.left_out > 0
    assert {span.call for span in drawn.spans} == set(range(len(drawn.calls)))
    assert all(span.segment == drawn.calls[span.call].segment for span in drawn.spans)


def test_how_the_programs_of_a_segment_were_found_is_counted() -> None:
    table, training = SegmentTable("r", lambda: True), Training(segments=1)
    captures = [
        telemetry_pb2.Capture(program=7, compilations=[telemetry_pb2.TorchCompilation(took_s=0.5)]),
        telemetry_pb2.Capture(program=7, is_known=True),
        telemetry_pb2.Capture(program=8, reason="it makes a leaf"),
        telemetry_pb2.Capture(program=8, compilations=[telemetry_pb2.TorchCompilation(took_s=0.25, guard="x == 1")]),
        telemetry_pb2.Capture(),
    ]
    for step, capture in enumerate(captures):
        table.take(training.call(step, 0, capture=capture), [0.0] * 9, NOW_S)
    (row,) = table
    shown = SegmentStatus.model_validate(row, from_attributes=True)
    assert (shown.calls, shown.known, shown.programs, shown.compilations, shown.compile_s) == (5, 1, 2, 2, 0.75)
    assert [(one.text, one.times) for one in shown.recorded] == [("it makes a leaf", 1)]
    assert [(one.text, one.times) for one in shown.recompiled] == [("x == 1", 1)]
    for number in range(REASONS + 2):
        capture = telemetry_pb2.Capture(program=10 + number, reason=f"reason {number}")
        table.take(training.call(9 + number, 0, capture=capture), [0.0] * 9, NOW_S)
    assert [one.text for one in row.recorded][-1] == f"reason {REASONS + 1}"
    assert len(row.recorded) == REASONS
