"""What counts as use of the machine by others."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from backhaul_server.worker import idleness
from backhaul_server.worker.idleness import BUSY_S, CpuUsage, Idleness, gpu_usage
from conftest import wait_until


def test_a_moment_of_use_does_not_end_a_worker_but_a_while_does(monkeypatch: pytest.MonkeyPatch) -> None:
    now, used = 0.0, 0.0
    monkeypatch.setattr(idleness, "monotonic", lambda: now)
    watch = Idleness(10.0, lambda _: used, 0.5, "CPU")
    for second in range(1, 11):
        assert not watch.is_idle
        now = second
        watch.look(0)
    assert watch.is_idle
    for sample in (0.0, 0.0, 0.0, 2.0):
        used = sample
        watch.look(1)
        assert not watch.is_busy
    assert not watch.is_idle
    watch.look(1)
    assert watch.is_busy
    watch.look(2)  # the next worker
    assert not watch.is_busy
    used = 0.0
    for _ in range(BUSY_S):
        watch.look(1)
    assert (watch.is_idle, watch.is_busy) == (False, False)


@pytest.fixture
def spinning() -> Iterator[int]:
    """A process that uses a core, in a session of its own."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True)
    yield process.pid
    process.kill()
    process.wait()


def test_the_workers_own_use_of_the_cpu_does_not_count(spinning: int) -> None:
    counting, not_counting = CpuUsage(), CpuUsage()
    assert (counting(0), not_counting(spinning)) == (0.0, 0.0)

    def own_cores() -> float:
        return counting(0) - not_counting(spinning)

    wait_until(lambda: own_cores() > 0.1, "its use is seen, and left out")


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program in the place of nvidia-smi, which prints a file."""
    script = tmp_path / "nvidia-smi"
    script.write_text(f'#!/bin/sh\n[ "$1" = -L ] && exit 0\ncat "{tmp_path}/printed"\n')
    script.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    return tmp_path / "printed"


def test_others_on_the_gpu_count_and_the_worker_does_not(smi: Path, spinning: int) -> None:
    smi.write_text(
        "# gpu         pid   type     sm    mem    enc    dec    jpg    ofa    command\n"
        "# Idx           #    C/G      %      %      %      %      %      %    name\n"
        f"    0      {spinning}     C     90     12      -      -      -      -    python\n"
        "    0       4194305     G      7      2      -      -      -      -    Xorg\n"
        "    0       4194306     C      -      -      -      -      -      -    python\n"
        "    0       4194307   C+G      6      1      -      -      -      -    game\n"
    )
    assert gpu_usage("0", spinning) == 13.0
    assert gpu_usage("0", 0) == 103.0
    smi.write_text("    0          -     -      -      -      -      -      -      -    -\n")
    assert gpu_usage("0", 0) == 0.0


def test_the_device_decides_what_is_measured(smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi.write_text("")
    devices = {device: Idleness.of(device, 1.0).what for device in ("cpu", "cuda:1", "cuda", "auto", "cuda:x")}
    assert devices == {"cpu": "CPU", "cuda:1": "GPU 1", "cuda": "GPU 0", "auto": "GPU 0", "cuda:x": "GPU 0"}
    monkeypatch.setenv("PATH", "")
    assert Idleness.of("auto", 1.0).what == "CPU"
    assert gpu_usage("0", 0) == 0.0


@pytest.mark.parametrize(
    ("visible", "device", "gpu"),
    [("", "cuda:1", "1"), ("2,3", "cuda:1", "3"), ("2,3", "auto", "2"), ("GPU-a, GPU-b", "cuda:1", "GPU-b")],
)
def test_a_gpu_is_counted_among_the_visible_ones(
    visible: str, device: str, gpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(idleness, "_has_gpu", lambda: True)
    assert Idleness.of(device, 1.0).what == f"GPU {gpu}"


@pytest.mark.parametrize("visible", ["", "-1", " ,1", "-1,0"])
def test_a_worker_that_sees_no_gpu_looks_at_the_cpu(visible: str, smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Idleness.of("auto", 1.0).what == "GPU 0"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert Idleness.of("auto", 1.0).what == "CPU"
