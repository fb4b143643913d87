"""`make gpu-check` without a GPU: its code runs as it does on one, with the sizes of a toy."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.simulated_cuda.build import obstacle

ROOT = Path(__file__).parents[2]
PATIENT = ["--budget", "1500"]  # a slow machine fails no test
CHECK = ["bash", str(ROOT / "tests/gpu_check/gpu-check.sh"), "--python", sys.executable, *PATIENT]
SIMULATED = [sys.executable, "-m", "support.simulated_cuda"]


def checked(command: list[str], out: Path) -> list[dict[str, Any]]:
    """Runs it. Returns its findings, which are all good."""
    path = os.pathsep.join(["tests", *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "OUT": str(out), "PYTHONPATH": path}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    rows = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert [row for row in rows if row["ok"] is False] == []
    return rows


@pytest.mark.slow
def test_parts_of_it_run_on_a_cpu(tmp_path: Path) -> None:
    rows = checked([*CHECK, "--device", "cpu", "--only", "settings,staging"], tmp_path)
    assert {row["part"] for row in rows} == {"settings", "staging"}
    assert (tmp_path / "summary.txt").read_text().endswith(" 0 failed, 1 figures\n")


@pytest.mark.slow
def test_a_part_that_gets_no_time_fails(tmp_path: Path) -> None:
    command = [*CHECK, "--device", "cpu", "--only", "imports", "--budget", "1"]
    environment = {**os.environ, "OUT": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "no time was left" in (tmp_path / "summary.txt").read_text()


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_all_of_it_runs_on_a_cpu(tmp_path: Path) -> None:
    checked([*CHECK, "--device", "cpu"], tmp_path)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_it_runs_on_a_simulated_device(tmp_path: Path) -> None:
    if why := obstacle():
        pytest.skip(why)
    # The accelerators' tests, which run the demo too, have a run of their own there.
    parts = "imports,settings,undefined,digest,staging,durations,gradients,attention,recurrent,blocks,waits,devices"
    checked([*SIMULATED, *CHECK, "--device", "cuda", "--only", f"{parts},layer,rates,depth"], tmp_path)
