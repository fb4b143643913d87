"""The process of one group: pins itself, measures, writes what it found. `python -m backhaul_bench.child`."""

import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

from backhaul_bench.figures import FIGURES, Verdict
from backhaul_bench.noise import pin
from backhaul_bench.outcomes import Outcome, without_value
from backhaul_bench.rounds import UnequalGradientsError
from backhaul_bench.stage import Stage

Measure = Callable[[Stage], list[Outcome]]
MEASURES = {
    "steps": "backhaul_bench.steps:measure",
    "small_frozen": "backhaul_bench.small:measure_frozen",
    "small": "backhaul_bench.small:measure_trainable",
    "peak_flat": "backhaul_bench.peaks:measure_flat",
    "peaks": "backhaul_bench.peaks:measure_beside_others",
    "wire": "backhaul_bench.wire:measure",
    "transfers": "backhaul_bench.transfers:measure",
    "shared_memory": "backhaul_bench.shared_memory:measure",
    "roundtrip": "backhaul_bench.roundtrip:measure",
    "growth": "backhaul_bench.growth:measure",
    "tenants": "backhaul_bench.tenants:measure",
    "hivemind": "backhaul_bench.beside_hivemind:measure",
    "torch_rpc": "backhaul_bench.beside_torch_rpc:measure",
    "cores": "backhaul_bench.cores:measure",
    "checks_large": "backhaul_bench.checks:measure_large",
    "checks_small": "backhaul_bench.checks:measure_small",
    "telemetry": "backhaul_bench.telemetry:measure",
}
"""Where each group is measured, by module and function: imported when wanted, for they import torch."""


def measure(group: str, stage: Stage) -> list[Outcome]:
    """The outcomes of a group; all failed, without a number, where gradients were not equal."""
    module, _, function = MEASURES[group].partition(":")
    found: Measure = getattr(import_module(module), function)
    try:
        return found(stage)
    except UnequalGradientsError as error:
        return [without_value(figure.name, Verdict.FAILED, str(error)) for figure in FIGURES if figure.group == group]


def main(group: str, trainer_core: str, worker_core: str, results: str) -> None:
    """Measures a group on two cores and writes the outcomes as JSON."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what it has started is ended
    pin(int(trainer_core))  # before torch starts threads
    import torch

    torch.set_num_threads(1)
    with Stage.of(int(trainer_core), int(worker_core), os.getpid()) as stage:
        found = measure(group, stage)
    Path(results).write_text(json.dumps([asdict(outcome) for outcome in found]))


if __name__ == "__main__":
    main(*sys.argv[1:])
