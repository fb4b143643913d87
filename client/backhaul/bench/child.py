"""The process of one group: pins itself, measures, writes what it found. `python -m backhaul.bench.child`."""

import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

from backhaul.bench.figures import FIGURES, Verdict
from backhaul.bench.noise import pin
from backhaul.bench.outcomes import Outcome, without_value
from backhaul.bench.rounds import UnequalGradientsError
from backhaul.bench.stage import Stage

Measure = Callable[[Stage], list[Outcome]]
MEASURES = {
    "steps": "backhaul.bench.steps:measure",
    "small_frozen": "backhaul.bench.small:measure_frozen",
    "small": "backhaul.bench.small:measure_trainable",
    "peak_flat": "backhaul.bench.peaks:measure_flat",
    "peaks": "backhaul.bench.peaks:measure_beside_others",
    "wire": "backhaul.bench.wire:measure",
    "transfers": "backhaul.bench.transfers:measure",
    "shared_memory": "backhaul.bench.shared_memory:measure",
    "roundtrip": "backhaul.bench.roundtrip:measure",
    "growth": "backhaul.bench.growth:measure",
    "tenants": "backhaul.bench.tenants:measure",
    "hivemind": "backhaul.bench.beside_hivemind:measure",
    "torch_rpc": "backhaul.bench.beside_torch_rpc:measure",
    "cores": "backhaul.bench.cores:measure",
    "checks_large": "backhaul.bench.checks:measure_large",
    "checks_small": "backhaul.bench.checks:measure_small",
    "telemetry": "backhaul.bench.telemetry:measure",
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
