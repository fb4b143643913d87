"""What a step holds on the trainer: counted live bytes, and the kernel's count beside them."""

import json
import os
import subprocess
import sys
from pathlib import Path

from support.processes import WorkerProcess

# Settings under which resident memory follows live memory instead of fragmentation.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}


def measured(worker: WorkerProcess, *layers: int) -> dict[str, dict[str, int]]:
    script = Path(__file__).parents[1] / "support/measure_memory.py"
    command = [sys.executable, str(script), worker.address, *map(str, layers)]
    found = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **MALLOC}, check=True)
    return json.loads(found.stdout.splitlines()[-1])


def test_peaks_against_torchs_checkpoint(worker: WorkerProcess) -> None:
    found = measured(worker, 8)["8"]
    for count in ("live", "resident"):
        assert found[f"gradients_{count}"] < found[f"torch_{count}"] < found[f"none_{count}"]
    assert found["activations_live"] <= found["torch_live"]
    # Both counts see the same; what gRPC holds for a moment only the kernel sees.
    for variant in ("none", "torch"):
        assert abs(found[f"{variant}_resident"] / found[f"{variant}_live"] - 1) < 0.1
