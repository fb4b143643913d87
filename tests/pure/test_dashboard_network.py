"""Links, alignment of clocks, the fleet, and a timeline of several trainers on one axis."""

import time
from math import inf

import pytest

from backhaul_proto.v1 import telemetry_pb2
from backhaul_runtime.process.discovery import parse_resolvers
from backhaul_server.dashboard.collect.links import Alignment, LinkRecord, alignment
from backhaul_server.dashboard.collect.training_runs import TrainerRun
from backhaul_server.dashboard.collect.watch import Watch
from backhaul_server.dashboard.views.fleet import fleet
from backhaul_server.dashboard.views.latency import latency
from backhaul_server.dashboard.views.missing_details import why_missing
from backhaul_server.dashboard.views.ranges import TimeRange
from backhaul_server.dashboard.views.timeline import timeline
from backhaul_server.dashboard.views.topology import topology
from support.reporting import Training

NOW_S = 1_760_000_000.0


def link_of(worker: str = "a:1", **fields: float) -> telemetry_pb2.Link:
    given = {"round_trip_s": 0.002, "clock_offset_s": 5.0, "clock_error_s": 0.001, "connected": True, **fields}
    return telemetry_pb2.Link(worker=worker, **given)  # type: ignore[arg-type]


def run_of(watch: Watch, training: Training, *links: telemetry_pb2.Link, now_s: float = NOW_S) -> TrainerRun:
    report = training.report([0, 1])
    report.links.extend(links)
    report.sent_at_s = training.began_at_s + 1
    watch.trainers.take(report, now_s, 0.0)
    run = watch.trainers.find(training.run)
    assert run is not None
    return run


def test_rates_are_those_of_the_last_ten_seconds_by_the_trainers_clock() -> None:
    record = LinkRecord(link_of("a:1"))
    assert record.rates(NOW_S) == (0.0, 0.0)
    for second in range(21):
        record.take(link_of(up_bytes=100 * second, down_bytes=10 * second**2), 500.0 + second, NOW_S + second)
    record.take(link_of(up_bytes=7), 505.0, NOW_S + 20)  # told twice
    up, down = record.rates(NOW_S + 21)
    assert up == pytest.approx(100)
    assert down == pytest.approx((4_000 - 1_000) / 10)
    assert record.rates(NOW_S + 60) == (0.0, 0.0)


def test_a_link_goes_on_after_the_trainers_clock_was_set_back() -> None:
    record = LinkRecord(link_of("a:1"))
    for second in range(3):
        record.take(link_of(up_bytes=100 * second), 5_000.0 + second, NOW_S + second)
    for second in range(3, 6):
        record.take(link_of(up_bytes=100 * second), 1_400.0 + second, NOW_S + second)
    record.take(link_of(up_bytes=300), 1_403.0, NOW_S + 6)  # told twice
    assert record.rates(NOW_S + 6)[0] == pytest.approx(100)
    assert record.heard_at_s == NOW_S + 5


def test_a_trainer_is_aligned_through_the_worker_with_the_smallest_error() -> None:
    links = [LinkRecord(link_of("a:1")), LinkRecord(link_of("b:2")), LinkRecord(link_of("c:3", round_trip_s=0.0))]
    links[0].take(link_of(clock_offset_s=5.0, clock_error_s=0.5), 1.0, 1.0)
    links[1].take(link_of("b:2", clock_offset_s=-3.0, clock_error_s=0.01), 1.0, 1.0)
    clocks = {"a:1": (7.0, 0.1), "b:2": (-1.5, 0.02), "c:3": (0.0, 0.0)}
    aligned = alignment(links, clocks)
    assert aligned is not None
    assert (aligned.shift_s, round(aligned.error_s, 9)) == (-1.5, 0.03)
    assert alignment(links, {}) is None
    assert alignment(links, {"a:1": (0.0, inf)}) is None


def test_a_trainer_of_an_old_version_has_links_without_numbers() -> None:
    watch, training = Watch(parse_resolvers("a:1,b:2")), Training(workers=["a:1"], began_at_s=NOW_S)
    run_of(watch, training)
    shown = topology(watch, NOW_S)
    assert {node.id for node in shown.nodes} == {"worker:a:1", "worker:b:2", f"run:{training.run}"}
    (link,) = shown.links
    assert (link.trainer, link.worker, link.state) == (
        f"run:{training.run}",
        "worker:a:1",
        "broken",
    )  # it was not asked yet
    assert (link.up_bytes_per_s, link.clock_offset_ms, link.measured_at_s) == (None, None, None)


def test_a_worker_that_only_a_trainer_knows_is_shown_as_unwatched() -> None:
    watch, training = Watch(parse_resolvers("a:1")), Training(workers=["elsewhere:9"], began_at_s=NOW_S)
    run_of(watch, training, link_of("elsewhere:9"))
    states = {node.id: node.state for node in topology(watch, NOW_S).nodes}
    assert states == {"worker:a:1": "unreachable", "worker:elsewhere:9": "unwatched", f"run:{training.run}": "running"}


def test_a_worker_with_another_address_is_recognised_by_its_session() -> None:
    watch, training = Watch(parse_resolvers("gpu-box:1")), Training(workers=["10.0.0.7:1"], began_at_s=NOW_S)
    run = run_of(watch, training, link_of("10.0.0.7:1"))
    assert watch.workers_of(run) == {}
    session = telemetry_pb2.SessionTelemetry(run=training.run)
    watch.workers[0].answered(telemetry_pb2.GetTelemetryResponse(epoch="e", sessions=[session]))
    assert watch.workers_of(run) == {"10.0.0.7:1": watch.workers[0]}
    (link,) = topology(watch, NOW_S).links
    assert (link.worker, link.state) == ("worker:gpu-box:1", "idle")


def test_a_lost_link_is_broken() -> None:
    watch, training = Watch(parse_resolvers("a:1")), Training(workers=["a:1"], began_at_s=NOW_S)
    run_of(watch, training, link_of(connected=False))
    watch.workers[0].answered(telemetry_pb2.GetTelemetryResponse(epoch="e"))
    (link,) = topology(watch, NOW_S).links
    assert link.state == "broken"


def test_numbers_of_a_link_to_a_worker_that_is_gone_have_the_time_of_the_last_report() -> None:
    watch, training = Watch(parse_resolvers("a:1")), Training(workers=["a:1"], began_at_s=NOW_S)
    run_of(watch, training, link_of())
    (worker,) = watch.workers
    worker.answered(telemetry_pb2.GetTelemetryResponse(epoch="e"))
    worker.failed("it did not answer in time")
    (soon,) = topology(watch, NOW_S + 5).links
    assert (soon.up_bytes_per_s, soon.measured_at_s) == (0.0, NOW_S)
    shown = topology(watch, NOW_S + 60)
    (later,) = shown.links
    assert (later.state, later.up_bytes_per_s, later.down_bytes_per_s) == ("broken", None, None)
    assert (later.round_trip_ms, later.measured_at_s) == (2.0, NOW_S)
    seen = {node.kind: node.seen_at_s for node in shown.nodes}
    assert seen == {"worker": worker.answered_at_s, "trainer": pytest.approx(NOW_S, abs=1)}


def test_the_fleet_has_one_axis_and_holes_where_a_worker_was_silent() -> None:
    watch = Watch(parse_resolvers("a:1,b:2"))
    first = watch.workers[0]
    first.answered(
        telemetry_pb2.GetTelemetryResponse(epoch="e", memory=telemetry_pb2.MemoryTelemetry(budget_bytes=1_000))
    )
    del first.memory.at_s[:]
    for column in first.memory.columns:
        del column[:]
    for at_s, held in ((NOW_S - 15, 100), (NOW_S - 14, 500), (NOW_S - 5, 300)):
        first.memory.append(at_s, (held, 0, 0, 0))
        first.load.append(at_s, (held / 1_000,))
    shown = fleet(watch.workers, TimeRange(NOW_S - 30, NOW_S), 3)
    assert shown.interval_s == 10
    assert len(shown.at_s) == 3
    assert shown.at_s[-1] <= NOW_S < shown.at_s[-1] + 10
    one, other = shown.workers
    assert one.memory_share == [0.5, 0.3, None]
    assert one.load == [pytest.approx(0.3), 0.3, None]
    assert other.memory_share == other.load == [None, None, None]
    assert (other.state, other.seen_at_s, other.sessions, other.queued_requests) == ("unreachable", 0, None, None)


def test_the_fleet_has_the_time_of_the_last_answer_and_nothing_else_of_a_worker_that_is_gone() -> None:
    (worker,) = Watch(parse_resolvers("a:1")).workers
    gpu = telemetry_pb2.Accelerator(name="H100", total_bytes=80)
    worker.answered(telemetry_pb2.GetTelemetryResponse(epoch="e", queued_requests=3, accelerator=gpu))
    (serving,) = fleet([worker], TimeRange(NOW_S - 30, NOW_S), 3).workers
    assert (serving.sessions, serving.queued_requests, serving.seen_at_s) == (0, 3, worker.answered_at_s)
    assert serving.accelerator is not None
    worker.failed("it did not answer in time")
    (gone,) = fleet([worker], TimeRange(NOW_S - 30, NOW_S), 3).workers
    assert (gone.state, gone.seen_at_s) == ("unreachable", worker.answered_at_s)
    assert (gone.sessions, gone.queued_requests, gone.accelerator) == (None, None, None)


def test_the_load_is_what_a_worker_computed_of_the_time_that_passed() -> None:
    (worker,) = Watch(parse_resolvers("a:1")).workers
    for uptime_s, busy_s in ((10.0, 4.0), (12.0, 5.0), (13.0, 9.0)):
        worker.answered(telemetry_pb2.GetTelemetryResponse(epoch="e", uptime_s=uptime_s, busy_s=busy_s, clock_s=NOW_S))
    worker.answered(telemetry_pb2.GetTelemetryResponse(epoch="new", uptime_s=1.0, busy_s=0.5, clock_s=NOW_S))
    assert list(worker.load.columns[0]) == [0.5, 1.0]
    worker.answered(telemetry_pb2.GetTelemetryResponse(epoch="new", uptime_s=2.0))  # too old to tell
    assert len(worker.load.at_s) == 2


def test_ranks_with_different_clocks_are_on_one_axis() -> None:
    watch = Watch(parse_resolvers("a:1"))
    one, two = (Training(workers=["a:1"], began_at_s=NOW_S + ahead_s) for ahead_s in (0.0, 1_000.0))
    shown = timeline(
        [
            (run_of(watch, one), Alignment(0.25, 0.01)),
            (run_of(watch, two, now_s=NOW_S + 1_000), Alignment(-999.75, 0.02)),
        ],
        2,
    )
    assert shown.begins_at_s == pytest.approx(NOW_S + 0.25)
    assert shown.duration_ms == pytest.approx(800, abs=1)
    starts = {(step.run, step.number): step.start_ms for step in shown.steps}
    for number in (0, 1):
        assert starts[one.run, number] == pytest.approx(starts[two.run, number], abs=1)
    assert [run.error_ms for run in shown.runs] == [10.0, 20.0]
    assert {shown.calls[span.call].run for span in shown.spans if span.run == two.run} == {two.run}
    ends: dict[tuple[str, str, str, int], float] = {}
    for span in sorted(shown.spans, key=lambda span: span.start_ms):
        row = (span.run, span.lane, span.worker, span.row)
        assert ends.get(row, 0.0) <= span.start_ms
        ends[row] = span.start_ms + span.duration_ms


def test_phases_of_a_trainer_with_another_clock_are_in_the_range_of_the_dashboards() -> None:
    watch, training = Watch(parse_resolvers("a:1")), Training(workers=["a:1"], began_at_s=NOW_S + 1_000)
    run = run_of(watch, training, now_s=NOW_S + 1_000)
    (whole,) = latency(watch.calls, [(run, -1_000.0)], TimeRange(NOW_S, NOW_S + 60), "").phases
    (shown,) = latency(
        watch.calls, [(run, -1_000.0)], TimeRange(NOW_S, NOW_S + 60), "", TimeRange(NOW_S, NOW_S + 60)
    ).phases
    assert shown == whole
    assert shown.step == [0, 1]
    assert all(NOW_S <= at_s <= NOW_S + 60 for at_s in shown.at_s)


def test_a_timeline_without_bars_says_why() -> None:
    watch, training = Watch(parse_resolvers("a:1")), Training(began_at_s=NOW_S)
    assert timeline([], 3).why_empty.startswith("No trainer has reported yet.")
    watch.trainers.take(telemetry_pb2.TrainerReport(run=training.about()), NOW_S, 0.0)
    run = watch.trainers.find(training.run)
    assert run is not None
    assert timeline([(run, None)], 3).why_empty.startswith("No step has ended yet.")
    run_of(watch, training)
    assert timeline([(run, None)], 3).why_empty == ""
    elsewhen = TimeRange(NOW_S + 100, NOW_S + 200)
    assert timeline([(run, None)], 3, elsewhen).why_empty.startswith("No known step ended in this range")
    run.forget_detail()
    assert timeline([(run, None)], 3).why_empty.startswith("Timelines are kept for the last 8 runs")
    assert timeline([], 3, forgotten=1).why_empty.startswith("Timelines are kept for the last 8 runs")


def test_a_timeline_says_which_ranks_it_lacks() -> None:
    watch = Watch(parse_resolvers("a:1"))
    kept, dropped = (run_of(watch, Training(began_at_s=NOW_S)) for _ in range(2))
    dropped.forget_detail()
    shown = timeline([(kept, None), (dropped, None)], 1, forgotten=1)
    assert (shown.why_empty, len(shown.spans) > 0) == ("", True)
    assert shown.note == "Timelines are kept for 8 runs at a time: those of 2 of 3 runs are not shown."


def test_what_is_not_kept_of_a_run_depends_on_whether_it_still_reports() -> None:
    watch = Watch(parse_resolvers("a:1"))
    ended = run_of(watch, Training(began_at_s=NOW_S))
    assert why_missing("Segments", [ended]) == ""
    ended.forget_detail()
    assert why_missing("Segments", [ended]) == (
        "Segments are kept for the last 8 runs that reported since the dashboard was started, and this run is not "
        "among them. The table of runs shows what it cost and saved."
    )
    assert why_missing("Segments", [None, ended]).endswith("shows what they cost and saved.")
    running = run_of(watch, Training(began_at_s=time.time()), now_s=time.time())
    running.forget_detail()
    assert "others still report. End one of them" in why_missing("Segments", [running])


def test_the_alignment_of_a_watch_goes_through_its_own_comparison() -> None:
    watch, training = Watch(parse_resolvers("a:1")), Training(workers=["a:1"], began_at_s=time.time())
    run = run_of(watch, training, link_of(clock_offset_s=100.0, clock_error_s=0.001), now_s=time.time())
    assert watch.alignment(run) is None
    now_s = time.time()
    watch.workers[0].clock.compare(now_s - 0.002, now_s - 0.001 + 40.0, now_s)
    aligned = watch.alignment(run)
    assert aligned is not None
    assert aligned.shift_s == pytest.approx(60.0)
    assert aligned.error_s == pytest.approx(0.002, rel=0.5)
