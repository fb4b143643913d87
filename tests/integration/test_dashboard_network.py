"""Topology, fleet, events and verdicts of a real training, from connect() to the answers of the API."""

from typing import Any

import pytest
import torch

import backhaul
from conftest import QUIET, wait_until
from integration.test_telemetry import train
from support.dashboards import Dashboard
from support.processes import WorkerProcess

GRPC_WORDS = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "UNAUTHENTICATED", "CANCELLED", "StatusCode", "ipv4:")


def summary(dashboard: Dashboard, run: str) -> dict[str, Any]:
    return next((item for item in dashboard.items("runs") if item["run"] == run), {})


@pytest.mark.slow
def test_a_training_is_shown_with_its_name_links_load_and_verdict(worker: WorkerProcess) -> None:
    with (
        Dashboard(worker.address).ready() as dashboard,  # the load is the difference from its first look
        backhaul.connect(
            worker.address, run="lora-32k", settings=backhaul.Settings(tags=("a", "b"), notes="two\nlines")
        ) as session,
    ):
        train(session, 8, returns="gradients")
        wait_until(lambda: summary(dashboard, session.run).get("steps") == 8, "the steps are told")
        run = summary(dashboard, session.run)
        assert (run["name"], run["tags"], run["notes"]) == ("lora-32k", ["a", "b"], "two\nlines")
        assert (run["rank"], run["world_size"], run["id"]) == (0, 0, f"run:{session.run}")
        assert "run" not in run["settings"]
        assert run["verdict"]["saved_bytes"] > 0
        assert run["verdict"]["is_worth_it"] is not None
        assert " less memory than without checkpointing" in run["verdict"]["sentence"]
        assert "bitwise equal" in run["verdict"]["values"]
        assert [item["run"] for item in dashboard.items("runs?query=LORA&tag=a")] == [session.run]
        assert dashboard.items("runs?tag=lora") == []
        assert dashboard.api(f"runs/{session.run}")["name"] == "lora-32k"

        network = dashboard.api("topology")
        nodes = {node["id"]: node for node in network["nodes"]}
        trainer, shown_worker = nodes[f"run:{session.run}"], nodes[f"worker:{worker.address}"]
        assert (trainer["kind"], trainer["label"], trainer["state"]) == ("trainer", "lora-32k", "running")
        assert (shown_worker["kind"], shown_worker["state"]) == ("worker", "serving")
        (link,) = [link for link in network["links"] if link["trainer"] == trainer["id"]]
        assert link["worker"] == shown_worker["id"]
        assert link["up_bytes"] > 8 * 32 * 64 * 4  # the input of each first segment
        assert link["down_bytes"] > 0
        assert abs(link["clock_offset_ms"]) <= link["clock_error_ms"] + 1e-3  # both processes have the same clock
        assert link["round_trip_ms"] / 2 <= link["clock_error_ms"]

        timeline = dashboard.api(f"timeline?run={session.run}&steps=2")
        (clock,) = timeline["workers"]
        assert (clock["worker"], clock["clock_error_ms"] > 0) == (worker.address, True)
        (shown,) = timeline["runs"]
        assert abs(shown["shift_ms"]) <= shown["error_ms"] + 1e-3  # so have trainer and dashboard
        assert timeline["why_empty"] == ""

        # An hour: on a slow machine the training may have ended more than a minute ago.
        wait_until(lambda: any(dashboard.api("fleet?seconds=3600")["workers"][0]["load"]), "the load is sampled")
        fleet = dashboard.api("fleet?seconds=60&points=30")
        (member,) = fleet["workers"]
        assert len(member["load"]) == len(member["memory_share"]) == len(fleet["at_s"]) <= 30
        assert 0 < max(load for load in member["load"] if load is not None) <= 1
        (status,) = dashboard.items("workers")
        assert (status["busy_s"] > 0, status["accelerator"]) == (True, None)
    with Dashboard(worker.address) as later:  # the worker still has the reports
        wait_until(lambda: summary(later, session.run).get("state") == "ended", "the worker tells of the end")
        kinds = {event["kind"] for event in later.items(f"events?run={session.run}") if event["run"]}
        assert {"run_began", "run_ended"} <= kinds


@pytest.mark.slow
def test_the_loss_of_a_worker_is_told_in_plain_words(equal_speeds: None) -> None:
    with WorkerProcess() as one, WorkerProcess() as other, Dashboard(one.address, other.address) as dashboard:
        workers = f"{one.address},{other.address}"
        with backhaul.connect(workers, run="lossy", settings=QUIET) as session:
            train(session, 2, returns="gradients")
            wait_until(lambda: summary(dashboard, session.run).get("steps") == 2, "the steps are told")
            x = torch.randn(32, 64, requires_grad=True)
            for _ in range(8):  # so that both workers have segments
                x = session.checkpoint(torch.sin, x, returns="gradients")
            other.kill()
            x.sum().backward()
            expected = {"run_began", "worker_lost", "worker_unreachable", "fell_back"}
            wait_until(
                lambda: expected <= {event["kind"] for event in dashboard.items(f"events?run={session.run}")},
                "all events are told",
            )
            events = dashboard.items(f"events?run={session.run}")
            (lost,) = [event for event in events if event["kind"] == "worker_lost"]
            assert (lost["worker"], lost["run"], lost["severity"]) == (other.address, session.run, "warning")
            assert {event["words"] for event in events} >= {"worker lost", "fallback", "worker stopped answering"}
            links = [link for link in dashboard.api("topology")["links"] if link["worker"] == f"worker:{other.address}"]
            assert [link["state"] for link in links] == ["broken"]
            texts = [event["text"] for event in events]
            texts += [alert["summary"] for alert in dashboard.items("alerts")]
            texts += [item["error"] for item in dashboard.items("workers")]
            texts += [row["reason"] for row in dashboard.api("segments")["rows"]]
            assert not [text for text in texts if any(word in text for word in GRPC_WORDS)]
            page = dashboard.api(f"events?run={session.run}&limit=2")
            assert (len(page["items"]), page["total"] >= 4) == (2, True)
            following = dashboard.api(f"events?run={session.run}&limit=1000&cursor={page['next']}")
            everything = [event["id"] for event in (*page["items"], *following["items"])]
            assert everything == [event["id"] for event in dashboard.items(f"events?run={session.run}")]
            assert len(set(everything)) == len(everything)
