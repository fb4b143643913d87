"""Tests of `backhaul bench` that measure single small figures."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from backhaul_lab.bench import roundtrip, tenants
from backhaul_lab.harness.rounds import Plan
from backhaul_lab.harness.stage import Stage

T = TypeVar("T")


@pytest.mark.nightly
def test_a_figure_that_can_not_be_had_is_said_by_the_whole_command(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    done = subprocess.run(
        [sys.executable, "-m", "backhaul", "bench", "--only", "vs_hivemind", "--json", str(file)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "unavailable" in done.stdout
    figures = json.loads(file.read_text())["figures"]
    assert figures["vs_hivemind"]["verdict"] == "unavailable"


@pytest.mark.nightly
def test_a_figure_is_measured_with_a_worker_and_a_yardstick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roundtrip, "PLAN", Plan(enough=1, most=1, warm=0))
    monkeypatch.setattr(roundtrip, "BACKWARDS", 1)
    monkeypatch.setattr(roundtrip, "TRIPS", 5)
    (outcome,) = on_stage(roundtrip.measure)
    assert outcome.name == "small_roundtrip"
    assert outcome.verdict == "inconclusive"  # One round is too few.
    assert outcome.undisturbed + outcome.dropped == 1
    assert outcome.details is not None
    assert all(isinstance(value, float | int) and value > 0 for value in outcome.details.values())


@pytest.mark.slow
def test_clients_without_torch_are_answered_with_the_right_gradient(tmp_path: Path) -> None:
    def answered(stage: Stage) -> bool:
        right = tenants.prepare(tmp_path)
        command = [sys.executable, "-P", "-m", "backhaul_lab.bench.tenant_client", stage.tcp_worker(), str(tmp_path)]
        stage.start(command, stage.trainer)
        return torch.equal(tenants.answer(tmp_path), right)

    assert on_stage(answered)


@pytest.mark.nightly
def test_what_is_started_is_ended_and_was_pinned() -> None:
    cores = sorted(os.sched_getaffinity(0))
    with Stage.of(cores[0], cores[-1], os.getpid()) as stage:
        session = stage.session()
        stage.tcp_worker()
        pids = list(stage.worker.pids)
        assert len(pids) == 3  # The session's worker, the other worker and its supervisor.
        assert all(os.sched_getaffinity(pid) == {cores[-1]} for pid in pids)
    assert session.closed
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert os.sched_getaffinity(0) == set(cores)


def on_stage(measure: Callable[[Stage], T]) -> T:
    cores = sorted(os.sched_getaffinity(0))
    with Stage.of(cores[0], cores[-1], os.getpid()) as stage:
        return measure(stage)
