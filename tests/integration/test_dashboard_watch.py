"""What the dashboard makes of workers that come, hang, restart and vanish, and of what trainers tell them."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from backhaul_proto.v1.telemetry_pb2 import TrainerReport
from conftest import wait_until
from support.cluster import Cluster
from support.dashboards import Dashboard
from support.reporting import FakeWorker, Training


@pytest.fixture
def workers() -> Iterator[tuple[FakeWorker, FakeWorker]]:
    with FakeWorker() as one, FakeWorker() as other:
        yield one, other


def state_of(dashboard: Dashboard, worker: FakeWorker) -> str:
    return next(str(row["state"]) for row in dashboard.items("workers") if row["address"] == worker.address)


@pytest.mark.slow
@pytest.mark.parametrize("fate", ["hung", "closed"])
def test_a_worker_that_falls_silent_is_soon_unreachable(fate: str, workers: tuple[FakeWorker, FakeWorker]) -> None:
    one, other = workers
    with Dashboard(one.address, other.address) as dashboard:
        wait_until(lambda: state_of(dashboard, one) == "serving", "it is seen")
        began_s = time.monotonic()
        if fate == "hung":
            one.hung.set()
        else:
            one.close()
        wait_until(lambda: state_of(dashboard, one) == "unreachable", "it is missed")
        assert time.monotonic() - began_s < 30  # 3 where nothing else runs; a connection's own limits are longer
        assert state_of(dashboard, other) == "serving"
        assert [alert["subject"] for alert in dashboard.items("alerts")] == [one.address]
        assert dashboard.api("overview")["healthy_workers"] == 1
        if fate == "hung":
            one.hung.clear()
            wait_until(lambda: state_of(dashboard, one) == "serving", "it is back")
            wait_until(lambda: dashboard.items("alerts") == [], "the alert ends")


@pytest.mark.slow
def test_a_restarted_worker_counts_from_0_again(workers: tuple[FakeWorker, FakeWorker]) -> None:
    one, _ = workers
    one.served("Backward", [0.01] * 1000)
    one.telemetry.memory.evictions = 50

    def calls(dashboard: Dashboard) -> int:
        return sum(rpc["calls"] for rpc in dashboard.api("latency")["rpcs"])

    def marks(dashboard: Dashboard) -> list[tuple[str, int]]:
        return [(mark["kind"], mark["count"]) for mark in dashboard.api("memory")["workers"][0]["marks"]]

    with Dashboard(one.address).ready() as dashboard:
        wait_until(lambda: state_of(dashboard, one) == "serving", "it is seen")
        assert calls(dashboard) == 0  # those were before anybody looked
        one.served("Backward", [0.01] * 7, errors=2)
        wait_until(lambda: calls(dashboard) == 7, "new ones are counted")
        one.restart()
        one.served("Backward", [0.01] * 3)
        wait_until(lambda: calls(dashboard) == 10, "those of the new one are counted, and nothing twice")
        assert marks(dashboard) == []
        with one.lock:
            one.telemetry.memory.evictions = 4
            one.telemetry.memory.refusals = 2
        wait_until(lambda: marks(dashboard) == [("eviction", 4), ("refusal", 2)], "marks are made")
        assert dashboard.api("latency")["rpcs"][0]["errors"] == 2


@pytest.mark.slow
def test_reports_are_taken_once_from_any_worker_in_any_order(workers: tuple[FakeWorker, FakeWorker]) -> None:
    one, other = workers
    training = Training(segments=3, workers=[one.address, other.address])
    one.tell(training.report([1]), training.report([0]), training.report([1]))
    other.tell(training.report([0]))
    with Dashboard(one.address, other.address) as dashboard:
        wait_until(lambda: bool(dashboard.items("runs")), "it is heard of")
        other.tell(training.report([2], is_closed=True), training.report([1]))
        wait_until(lambda: dashboard.items("runs")[0]["state"] == "ended", "it is closed")
        (run,) = dashboard.items("runs")
        assert (run["steps"], run["last_step"]) == (3, 2)
        assert run["up_bytes"] == 3 * training.step(0).up_bytes
        rows = dashboard.api("segments")["rows"]
        assert [(row["segment"], row["calls"]) for row in rows] == [("Block #0", 3), ("Block #1", 3), ("Block #2", 3)]
        assert dashboard.api(f"runs/{training.run}/steps")["step"] == [0, 1, 2]


@pytest.mark.nightly
def test_many_reports_come_in_pages(workers: tuple[FakeWorker, FakeWorker]) -> None:
    one, _ = workers
    training = Training(segments=1_000, workers=[one.address])
    one.tell(*(training.report([step]) for step in range(20)))
    with Dashboard(one.address) as dashboard:
        wait_until(lambda: dashboard.api("segments?limit=1")["rows"][:1] != [], "the first comes")
        wait_until(lambda: dashboard.api("segments?limit=1")["rows"][0]["calls"] == 20, "all come")


@pytest.mark.slow
def test_a_worker_that_wants_a_token_gets_its_own(tmp_path: Path) -> None:
    tokens = ["a" * 32, "b" * 32]
    files = [tmp_path / name for name in ("one", "other")]
    for file, token in zip(files, tokens, strict=True):
        file.write_text(token)
        file.chmod(0o600)
    with FakeWorker(tokens[0]) as one, FakeWorker(tokens[1]) as other:
        with Dashboard(one.address, other.address).ready() as dashboard:
            assert all("token" in worker["error"] for worker in dashboard.items("workers"))
        options = ("--worker-token-file", *map(str, files))
        with Dashboard(one.address, other.address, options=options).ready() as dashboard:
            assert [worker["state"] for worker in dashboard.items("workers")] == ["serving", "serving"]


@pytest.mark.slow
def test_nonsense_from_a_trainer_harms_nobody(workers: tuple[FakeWorker, FakeWorker]) -> None:
    one, _ = workers
    good = Training(segments=2)
    bad = good.report([0])
    bad.run.id = "../../etc/passwd"
    one.tell(bad, TrainerReport(), good.report([0]))
    with Dashboard(one.address) as dashboard:
        wait_until(lambda: [run["run"] for run in dashboard.items("runs")] == [good.run], "only the good one is taken")


@pytest.mark.nightly
def test_fifty_workers_and_ten_thousand_segments_are_shown() -> None:
    with Cluster(50, 10_000, jobs=0) as cluster, Dashboard(*cluster.addresses) as dashboard:
        wait_until(lambda: dashboard.api("segments?limit=1")["total"] == 10_000, "all are told")
        wait_until(lambda: dashboard.api("overview")["healthy_workers"] == 50, "all are seen")
        page = dashboard.api("segments?sort=segment&descending=true&limit=2")
        assert [row["segment"] for row in page["rows"]] == ["Block #9999", "Block #9998"]
        assert dashboard.get("/api/v1/segments.csv").text.count("\r\n") == 10_001


@pytest.mark.nightly
def test_the_workers_of_a_file_are_watched_while_it_names_them(
    workers: tuple[FakeWorker, FakeWorker], tmp_path: Path
) -> None:
    one, other = workers
    file = tmp_path / "workers"
    file.write_text(f"{one.address}\n")

    def watched(dashboard: Dashboard) -> list[str]:
        return [str(row["address"]) for row in dashboard.items("workers") if row["state"] == "serving"]

    with Dashboard(f"file:{file}") as dashboard:
        wait_until(lambda: watched(dashboard) == [one.address], "it is watched")
        assert dashboard.get("/readyz").status_code == 200
        file.write_text(f"{one.address}\n{other.address}\n")
        wait_until(lambda: watched(dashboard) == [one.address, other.address], "the other one is watched as well")
        file.unlink()
        wait_until(lambda: "Its workers stay as they are" in dashboard.logged(), "the trouble is logged")
        assert watched(dashboard) == [one.address, other.address]
        file.write_text(f"{other.address}\n")
        wait_until(lambda: watched(dashboard) == [other.address], "the first one is no longer watched")
        one.close()
        assert dashboard.items("alerts") == []
