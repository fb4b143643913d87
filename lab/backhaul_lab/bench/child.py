"""The process that measures one group. It pins itself, measures and writes the outcomes.

Usage: `python -m backhaul_lab.bench.child GROUP TRAINER_CORE WORKER_CORE RESULTS_FILE`.
"""

import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

from backhaul_lab.bench.device import make_deterministic
from backhaul_lab.bench.figures import FIGURES, Verdict
from backhaul_lab.bench.noise import pin
from backhaul_lab.bench.outcomes import Outcome, without_value
from backhaul_lab.bench.rounds import UnequalGradientsError
from backhaul_lab.bench.stage import Stage

Measure = Callable[[Stage], list[Outcome]]
MEASURES = {
    "steps": "backhaul_lab.bench.steps:measure",
    "small_frozen": "backhaul_lab.bench.small:measure_frozen",
    "small": "backhaul_lab.bench.small:measure_trainable",
    "deferred": "backhaul_lab.bench.deferred:measure",
    "deferred_third": "backhaul_lab.bench.deferred:measure_third",
    "deferred_lost": "backhaul_lab.bench.deferred:measure_lost",
    "deferred_wire": "backhaul_lab.bench.deferred:measure_wire",
    "deferred_lora": "backhaul_lab.bench.deferred:measure_adapted",
    "peak_flat": "backhaul_lab.bench.peaks:measure_flat",
    "peaks": "backhaul_lab.bench.peaks:measure_beside_others",
    "wire": "backhaul_lab.bench.wire:measure",
    "transfers": "backhaul_lab.bench.transfers:measure",
    "connections": "backhaul_lab.bench.links:measure",
    "shared_memory": "backhaul_lab.bench.shared_memory:measure",
    "roundtrip": "backhaul_lab.bench.roundtrip:measure",
    "growth": "backhaul_lab.bench.growth:measure",
    "tenants": "backhaul_lab.bench.tenants:measure",
    "credentials": "backhaul_lab.bench.tenants:measure_credentials",
    "hivemind": "backhaul_lab.bench.beside_hivemind:measure",
    "torch_rpc": "backhaul_lab.bench.beside_torch_rpc:measure",
    "compression_thin": "backhaul_lab.bench.thin_link:measure",
    "cores": "backhaul_lab.bench.cores:measure",
    "checks_large": "backhaul_lab.bench.checks:measure_large",
    "checks_small": "backhaul_lab.bench.checks:measure_small",
    "telemetry": "backhaul_lab.bench.telemetry:measure",
}
"""Module and function that measure each group. They are imported when needed, because they import torch."""


def measure(group: str, stage: Stage) -> list[Outcome]:
    """Returns the outcomes of a group. If gradients were not equal, all of them are failed and have no value."""
    module, _, function = MEASURES[group].partition(":")
    measure_group: Measure = getattr(import_module(module), function)
    try:
        return measure_group(stage)
    except UnequalGradientsError as error:
        return [without_value(figure.name, Verdict.FAILED, str(error)) for figure in FIGURES if figure.group == group]


def main(group: str, trainer_core: str, worker_core: str, results: str) -> None:
    """Measures a group on two cores and writes the outcomes as JSON."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # Unwinds, so that the stage ends its processes.
    pin(int(trainer_core))  # Before torch is imported, because its threads inherit the affinity.
    import torch

    torch.set_num_threads(1)
    make_deterministic()
    with Stage.of(int(trainer_core), int(worker_core), os.getpid()) as stage:
        outcomes = measure(group, stage)
    Path(results).write_text(json.dumps([asdict(outcome) for outcome in outcomes]))


if __name__ == "__main__":
    main(*sys.argv[1:])
