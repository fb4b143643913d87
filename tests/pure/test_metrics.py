"""/metrics: every metric once, named by Prometheus' rules, and of each the number that it says."""

import re
import tracemalloc

import pytest
from prometheus_client.parser import text_string_to_metric_families

from backhaul_proto.v1 import telemetry_pb2
from backhaul_runtime.wire.telemetry import BOUNDS_S
from backhaul_server.dashboard.metrics.definitions import BUCKETS_S, METRICS, histogram
from backhaul_server.dashboard.metrics.exposition import MetricsSnapshot, exposition
from backhaul_server.dashboard.schemas.events import KINDS, EventEntry
from support.fake_watch import SUMS, FakeTrainers, FakeWatch, FakeWorker, telemetry_of

BASE_UNITS = {"bytes", "seconds", "ratio"}
COUNTED = {"sessions", "segments", "requests", "runs", "up", "info", "draining"}
FEW = [
    "worker",
    "version",
    "device",
    "fingerprint",
    "tier",
    "method",
    "decision",
    "lane",
    "direction",
    "accelerator",
    "kind",
    "le",
]
SESSIONS = (
    telemetry_pb2.SessionTelemetry(
        trainer="trainer-secret", run="run-secret", segments=5, drift=1e-7, client_version="0.0.9"
    ),
    telemetry_pb2.SessionTelemetry(segments=2, drift=3e-7, client_version="0.1.0"),
)


def samples(watch: FakeWatch) -> dict[tuple[str, ...], float]:
    """By name and values of labels, in the order of FEW."""
    families = text_string_to_metric_families(exposition(MetricsSnapshot(watch.as_watch)).decode())
    return {
        (s.name, *(s.labels[name] for name in sorted(s.labels, key=FEW.index))): s.value
        for family in families
        for s in family.samples
    }


def test_each_number_is_what_the_worker_said() -> None:
    values = samples(FakeWatch([FakeWorker(telemetry=telemetry_of(*SESSIONS))]))
    of_worker = {
        name.removeprefix("backhaul_worker_"): value
        for (name, *labels), value in values.items()
        if labels == ["a:1"] and name.startswith("backhaul_worker_")
    }
    assert of_worker == {
        "up": 1,
        "draining": 0,
        "uptime_seconds": 12,
        "memory_budget_bytes": 1000,
        "memory_reserve_bytes": 50,
        "resident_memory_bytes": 5000,
        "refusals_total": 3,
        "evictions_total": 4,
        "sessions": 2,
        "skewed_sessions": 1,
        "segments": 7,
        "drift_ratio": 3e-7,
        "queued_requests": 2,
        "recomputed_segments_total": 7,
        "received_bytes_total": 8,
        "sent_bytes_total": 9,
        "busy_seconds_total": 6.5,
        "spared_bytes_total": 11,
    }
    tiers = {key[2]: value for key, value in values.items() if key[0] == "backhaul_worker_memory_bytes"}
    assert tiers == {"segments": 400, "cached": 300, "working": 20, "results": 10}
    assert values["backhaul_worker_accelerator_utilization_ratio", "a:1", "GPU"] == 0.5
    assert values["backhaul_worker_accelerator_memory_bytes", "a:1", "GPU", "used"] == 600
    assert values["backhaul_worker_accelerator_memory_bytes", "a:1", "GPU", "total"] == 800
    assert values["backhaul_rpc_errors_total", "a:1", "Backward"] == 1
    (info,) = [key for key in values if key[0] == "backhaul_worker_info"]
    assert re.fullmatch(r"[0-9a-f]{8}", info[4])
    assert info[1:4] == ("a:1", "0.1.0", "cpu")


def test_events_are_counted_by_kind() -> None:
    watch = FakeWatch()
    watch.events.add(EventEntry(id="1", at_s=10.0, kind="refusals", count=7))
    watch.events.add(EventEntry(id="1", at_s=10.0, kind="refusals", count=7))  # told twice
    watch.events.add(EventEntry(id="2", at_s=11.0, kind="worker_lost"))
    counts = {name[1]: value for name, value in samples(watch).items() if name[0] == "backhaul_events_total"}
    assert set(counts) == set(KINDS)
    assert {kind: count for kind, count in counts.items() if count} == {"refusals": 7, "worker_lost": 1}


def test_each_number_is_what_trainers_said() -> None:
    sums = {name: float(number) for number, name in enumerate(SUMS, 1)}
    watch = FakeWatch(trainers=FakeTrainers(dropped=101, saved_bytes=102, running=103, **sums))
    values = {name: value for name, value in samples(watch).items() if name[0] != "backhaul_events_total"}
    assert values.pop(("backhaul_trainer_mixed_runs",)) == 0
    exported = {name: value for name, value in sums.items() if name != "calls"}  # those stand in the recomputations
    assert sorted(values.values()) == sorted([*exported.values(), 101, 102, 103])  # each once
    assert values["backhaul_trainer_steps_total",] == sums["steps"]
    assert values["backhaul_trainer_recomputations_total", "trainer"] == sums["on_trainer"]
    assert values["backhaul_trainer_lane_seconds_total", "queue"] == sums["queue_s"]
    assert values["backhaul_trainer_transferred_bytes_total", "down"] == sums["down_bytes"]
    assert values["backhaul_trainer_saved_bytes",] == 102


def test_durations_are_a_cumulative_histogram() -> None:
    durations_s = (BOUNDS_S[4], BOUNDS_S[4] * 1.01, 0.003, 1000.0)
    values = samples(FakeWatch([FakeWorker(telemetry=telemetry_of(durations_s=durations_s))]))
    name = "backhaul_rpc_duration_seconds"
    counts = [values[f"{name}_bucket", "a:1", "Backward", repr(bound)] for bound in BUCKETS_S]
    assert counts == [sum(duration_s <= bound for duration_s in durations_s) for bound in BUCKETS_S]
    assert values[f"{name}_bucket", "a:1", "Backward", "+Inf"] == values[f"{name}_count", "a:1", "Backward"] == 4
    assert values[f"{name}_sum", "a:1", "Backward"] == pytest.approx(sum(durations_s))


def test_a_worker_that_counts_in_other_buckets_gives_no_wrong_ones() -> None:
    counted = histogram(telemetry_pb2.RpcTelemetry(calls=3, total_s=2.5, buckets=[1, 1, 1]))
    assert (set(counted.counts), counted.calls, counted.sum_s) == ({0}, 3, 2.5)


def test_a_run_whose_workers_differ_is_mixed() -> None:
    def telemetry_with(torch: str, *runs: str) -> telemetry_pb2.GetTelemetryResponse:
        telemetry = telemetry_of(*(telemetry_pb2.SessionTelemetry(run=run) for run in runs))
        telemetry.fingerprint["torch"] = torch
        return telemetry

    answers = [
        telemetry_with("2.13.0", "mixed", "same", ""),
        telemetry_with("2.13.0", "same", ""),
        telemetry_with("2.15.0", "mixed", ""),
    ]
    values = samples(FakeWatch([FakeWorker(f"w:{n}", telemetry=answer) for n, answer in enumerate(answers, 1)]))
    assert values["backhaul_trainer_mixed_runs",] == 1


def test_of_a_worker_out_of_reach_only_that_is_told() -> None:
    silent = FakeWorker("b:2", "unreachable", telemetry_of(*SESSIONS))
    values = samples(FakeWatch([FakeWorker(telemetry=telemetry_of()), silent, FakeWorker("c:3", "unreachable")]))
    assert [key for key in values if "b:2" in key or "c:3" in key] == [
        ("backhaul_worker_up", "b:2"),
        ("backhaul_worker_up", "c:3"),
    ]
    assert values["backhaul_worker_up", "b:2"] == 0


def test_names_follow_the_rules() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert re.fullmatch(r"backhaul_[a-z]+(_[a-z]+)*", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        last = metric.name.removesuffix("_total").rpartition("_")[2]
        assert metric.kind == "counter" or last in BASE_UNITS | COUNTED, metric.name
        assert not re.search(r"milli|micro|kilo|mega|minutes|percent", metric.name)
        assert metric.help and not metric.help.endswith(".")


def test_labels_are_of_what_there_are_few() -> None:
    assert {label for metric in METRICS for label in metric.labels} <= set(FEW)
    text = exposition(MetricsSnapshot(FakeWatch([FakeWorker(telemetry=telemetry_of(*SESSIONS))]).as_watch)).decode()
    assert "secret" not in text


def test_a_label_that_needs_escaping_can_be_read_back() -> None:
    telemetry = telemetry_of()
    telemetry.device = 'odd "device"\n\\'
    values = samples(FakeWatch([FakeWorker(telemetry=telemetry)]))
    assert [key[3] for key in values if key[0] == "backhaul_worker_info"] == ['odd "device"\n\\']


def test_fifty_workers_take_little() -> None:
    watch = FakeWatch([FakeWorker(f"w:{port}", telemetry=telemetry_of(*SESSIONS)) for port in range(1, 51)])
    exposition(MetricsSnapshot(watch.as_watch))
    tracemalloc.start()
    try:
        size = len(exposition(MetricsSnapshot(watch.as_watch)))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert size < 1 << 20
    assert peak < 8 << 20
