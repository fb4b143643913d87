"""What a step holds on the trainer: counted live bytes, and the kernel's count beside them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from backhaul import Session
from backhaul.demo.peak_memory import peak_live_bytes
from support.processes import WorkerProcess

# Settings under which resident memory follows live memory instead of fragmentation.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}


def measured(worker: WorkerProcess, *layers: int) -> dict[str, dict[str, int]]:
    script = Path(__file__).parents[1] / "support/measure_memory.py"
    command = [sys.executable, str(script), worker.address, *map(str, layers)]
    process = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **MALLOC}, check=True)
    return json.loads(process.stdout.splitlines()[-1])


@pytest.mark.nightly
def test_peaks_against_torchs_checkpoint(worker: WorkerProcess) -> None:
    peaks = measured(worker, 4)["4"]
    for count in ("live", "resident"):
        assert peaks[f"gradients_{count}"] < peaks[f"torch_{count}"] < peaks[f"none_{count}"]
    assert peaks["activations_live"] <= peaks["torch_live"]
    # Both counts see the same; what gRPC holds for a moment only the kernel sees.
    for variant in ("none", "torch"):
        assert abs(peaks[f"{variant}_resident"] / peaks[f"{variant}_live"] - 1) < 0.1


@pytest.mark.slow
def test_the_peak_does_not_grow_with_depth(session: Session, returns: str) -> None:
    layer, x = nn.Linear(16, 16), torch.randn(1 << 14, 16, requires_grad=True)  # 1 MiB

    def step(depth: int) -> None:
        h = x
        for _ in range(depth):
            h = h + session.checkpoint(layer, h, returns=returns)
        h.sum().backward()

    step(1)  # gradients are there from now on
    few, many = (peak_live_bytes(lambda depth=depth: step(depth)) for depth in (8, 32))  # type: ignore[misc]
    in_flight = 5 * x.nbytes  # four of this size may wait to be sent, and the call that waits for room holds another
    assert few > 4 * x.nbytes
    assert many <= few + in_flight
    assert session.report().fallbacks == 0
