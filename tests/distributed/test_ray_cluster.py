"""A fleet on three nodes of a Ray cluster that loses a worker process, an actor, a node and its head."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import backhaul
from conftest import QUIET, wait_until
from integration.test_discovery import Training
from integration.test_ray import fleet
from support.bits import differing, plainly
from support.ray_cluster import RayCluster, RayNode

WORKERS, STEPS = 3, 3
RECOVERY_S = 240.0
OPTIONS = ("--memory", "256MiB", "--device", "cpu")


def trained(training: Training, disturb: Callable[[], object] = int) -> list[Tensor | None]:
    """The losses and gradients of some steps, of which the first one is disturbed between forward and backward."""
    results: list[Tensor | None] = []
    for _ in range(STEPS):
        loss = training.forward()
        disturb()
        disturb = int
        results += [loss.detach(), *training.step(loss)]
    return results


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.distributed
@pytest.mark.timeout(600)
def test_training_goes_on_when_parts_of_the_cluster_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    without = Training(plainly)
    expected = [trained(without) for _ in range(6)]
    with RayCluster(3) as cluster:
        head, lost, _ = cluster.nodes
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        fleet(cluster, "up", "--name", "three", "--workers", str(WORKERS), "--", *OPTIONS)
        with backhaul.connect("ray:three", settings=QUIET) as session:
            ours = Training(session.checkpoint)

            def addresses() -> list[str]:
                return sorted(handle.connection.name for handle in session._workers if handle.up is not None)

            def address_on(node: RayNode) -> str:
                (address,) = (address for address in addresses() if address.startswith(f"{node.address}:"))
                return address

            def recovers(what: str, holds: Callable[[], bool]) -> None:
                def is_recovered() -> bool:
                    return len(addresses()) == len(session._workers) == WORKERS and holds()

                wait_until(is_recovered, what, RECOVERY_S)

            recovers("all workers are up", lambda: True)
            assert {address.partition(":")[0] for address in addresses()} == {node.address for node in cluster.nodes}
            assert differing(trained(ours), expected[0]) == []
            assert session.report().fallbacks == 0

            address = address_on(lost)
            worker = lost.serving(address)
            assert differing(trained(ours, lambda: os.kill(worker, signal.SIGKILL)), expected[1]) == []
            recovers("the worker is restarted", lambda: lost.serving(address) not in {0, worker})

            worker = lost.serving(address)
            assert differing(trained(ours, lambda: os.kill(parent_of(worker), signal.SIGKILL)), expected[2]) == []
            recovers("the actor is restarted", lambda: address not in addresses())

            assert differing(trained(ours, lost.kill), expected[3]) == []
            recovers("the actor has moved", lambda: not any(a.startswith(lost.address) for a in addresses()))

            # All three compute again.
            before = session.report()
            assert differing(trained(ours), expected[4]) == []
            assert session.report().remote > before.remote
            assert session.report().fallbacks == before.fallbacks
            status = json.loads(fleet(cluster, "status", "--json"))
            assert [worker["state"] for worker in status] == ["serving"] * WORKERS
            assert sorted(worker["address"] for worker in status) == addresses()

            assert differing(trained(ours, head.kill), expected[5]) == []


@pytest.mark.distributed
def test_a_trainer_outside_of_the_cluster_follows_a_fleet(monkeypatch: pytest.MonkeyPatch) -> None:
    with RayCluster(1) as cluster:
        fleet(cluster, "up", "--name", "two", "--workers", "2", "--", *OPTIONS)
        scaled = fleet(cluster, "scale", "--name", "two", "--workers", "1", "--grace", "1")
        assert scaled == "two-1 has ended\n"
        monkeypatch.setenv("RAY_ADDRESS", cluster.client_address)
        with backhaul.connect("ray:two", settings=QUIET) as session:
            x = torch.randn(3, requires_grad=True)
            session.checkpoint(torch.sin, x, returns="gradients").sum().backward()
            assert (session.report().remote, session.report().fallbacks) == (1, 0)
            (address,) = (handle.connection.name for handle in session._workers)
        top = [sys.executable, "-m", "backhaul", "top", "--once", "ray:two"]
        done = subprocess.run(top, capture_output=True, text=True, check=False)
        assert address in done.stdout, done.stdout + done.stderr
        assert done.returncode == 0
