"""Tests that run a small `backhaul demo` as a newcomer would."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from conftest import wait_until
from support.nursery import run
from support.processes import WorkerProcess

SMALL = ["--layers", "2", "--width", "64", "--context", "256", "--batch", "2"]
VARIANTS = ["no checkpointing", "torch checkpoint", "backhaul activations", "backhaul gradients", "backhaul deferred"]


def demo(*options: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "backhaul", "demo", *SMALL, *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_all_five_variants_are_bitwise_equal(tmp_path: Path) -> None:
    process = demo("--steps", "3", "--json", str(tmp_path / "results.json"))
    shown, said = process.communicate(timeout=240)
    assert process.returncode == 0, said
    assert "bitwise equal in all five" in shown
    assert "step 3/3" in shown
    last = shown.strip().splitlines()[-1]
    assert re.match(r"Beside torch's checkpoint, Backhaul takes \d+ % less memory, for steps that are ", last)

    results = json.loads((tmp_path / "results.json").read_text())
    assert results["all_equal"] is True
    assert [variant["name"] for variant in results["variants"]] == VARIANTS
    for variant in results["variants"]:
        assert variant["losses_equal"] is True
        assert variant["gradients_equal"] is True
        assert len(variant["losses"]) == 3
        assert variant["median_step_s"] > 0
        assert variant["fallbacks"] == 0
        remote = variant["name"].startswith("backhaul")
        # Two layers and two micro-batches, each in three steps and in the one for memory.
        most = 16 if remote else 0
        least = 1 if variant["name"] == "backhaul deferred" else most  # the trainer computes a share
        assert least <= variant["segments_remote"] <= most
        assert (variant["up_bytes"] > 0) is (variant["down_bytes"] > 0) is remote
    peaks = {variant["name"]: variant["peak_bytes"] for variant in results["variants"]}
    assert peaks["backhaul gradients"] < peaks["torch checkpoint"]
    assert peaks["backhaul activations"] <= peaks["torch checkpoint"]


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_worker_dies_or_hangs_in_the_middle(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BACKHAUL_SILENCE_S", "2")  # by which a hang is noticed
    with WorkerProcess() as worker:
        process = demo("--steps", "4", "--worker", worker.address, "--json", str(tmp_path / "results.json"))
        assert process.stdout is not None
        assert any(line.startswith("step 1/4") for line in process.stdout)
        if number is signal.SIGKILL:
            worker.kill()
            process.communicate()
        else:
            os.kill(worker.pid, signal.SIGSTOP)
            process.communicate()
            os.kill(worker.pid, signal.SIGCONT)
    assert process.returncode == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["all_equal"] is True
    for variant in results["variants"][2:4]:
        assert variant["fallbacks"] > 0
        assert variant["segments_remote"] + variant["fallbacks"] == 20


@pytest.mark.nightly
def test_it_shows_its_dashboard_and_serves_until_it_is_stopped() -> None:
    process = demo("--steps", "1", "--dashboard", "--serve")
    assert process.stdout is not None
    url = next(line.split()[1] for line in process.stdout if line.startswith("serving "))
    assert httpx.get(f"{url}/healthz").text == "ok\n"
    (worker,) = httpx.get(f"{url}/api/v1/workers").json()["items"]
    expected = {"demo, activations", "demo, gradients", "demo, deferred"}
    wait_until(
        lambda: {run["name"] for run in httpx.get(f"{url}/api/v1/runs").json()["items"]} == expected,
        "each run has the name of its variant",
    )
    children = [path for path in Path("/proc").glob("[0-9]*") if _parent(path) == process.pid]
    assert worker["state"] == "serving"
    assert len(children) == 2
    process.terminate()
    process.communicate(timeout=240)
    wait_until(lambda: not any(path.exists() for path in children), "worker and dashboard end")
    assert process.returncode == 0


def _parent(process: Path) -> int:
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except FileNotFoundError:
        return 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--worker", "127.0.0.1:1"], "no worker answers at"),
        *[
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in (
                (["--width", "100"], "--width 100 is not a multiple of 32"),
                (["--steps", "0"], '"0" is not a number of at least 1'),
                (["--worker", "nowhere"], '"nowhere" can\'t be read'),
            )
        ],
    ],
)
def test_a_bad_option_is_named(options: list[str], message: str) -> None:
    process = run("demo", *SMALL, *options, BACKHAUL_CONNECT_TIMEOUT_S="1")
    assert process.returncode == 2
    assert message in process.stderr
