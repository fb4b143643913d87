"""Measures what a segment of an experiment's model costs, for the predictions of the simulator.

`python -m backhaul_experiment.training.calibration SETTINGS` reads JSON with the model, the seed and the cells, pins
itself to a core and its worker to another, and prints the costs of each kind of segment as a line of JSON.
"""

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from backhaul.simulate.costs import Costs
from backhaul_bench.noise import pin
from backhaul_bench.stage import OVER_TCP, Stage

if TYPE_CHECKING:
    from backhaul_experiment.training.variants import ExperimentVariant

_ROUNDS = 4


class _Phases:
    """The phases of a variant's step, one micro-batch each: a `PhasedTraining`."""

    def __init__(self, variant: "ExperimentVariant", rows: int) -> None:
        self._variant, self._rows, self._steps = variant, rows, 0
        self.clear_gradients = variant.optimizer.zero_grad
        self.optimize = variant.optimizer.step

    def forward(self) -> Any:
        """Runs forward of a micro-batch and returns the loss."""
        self._steps += 1
        return self._variant.forward(self._rows, self._steps)


def calibrate(stage: Stage, settings: Mapping[str, Any], cell: Mapping[str, Any]) -> Costs:
    """Measures the costs of a segment with a micro-batch of a cell.

    Args:
        stage: Cores of the measurement.
        settings: What the runner wrote: `model` and `seed`.
        cell: The cell's values by axis.
    """
    from backhaul_bench.simulation.calibration import footprint, measure_costs
    from backhaul_experiment.training.variants import BACKHAUL, NONE, ExperimentVariant

    # Over TCP, as between the nodes of a cell: memory shared with a worker on this machine would cost less.
    session = stage.session(stage.tcp_worker(), returns="gradients", telemetry=False, **OVER_TCP)
    variants = [
        ExperimentVariant(name, settings["model"], cell, settings["seed"], session if name == BACKHAUL else None)
        for name in (NONE, BACKHAUL)
    ]
    rows = cell["batch"] // cell["micro_batches"]
    segments = variants[0].segments
    x = variants[0].model.begin(rows, 0)[0].detach().requires_grad_()
    weight_bytes = sum(parameter.nbytes for segment in segments for parameter in segment.parameters())
    return measure_costs(
        stage,
        (_Phases(variants[0], rows), _Phases(variants[1], rows)),
        len(segments),
        weight_bytes // len(segments),
        x.nbytes,
        footprint(segments[0], x),
        _ROUNDS,
    )


def main() -> None:
    """Measures on two cores of this machine."""
    # What a model of the user's own prints must not be taken for costs.
    output, sys.stdout = os.fdopen(os.dup(1), "w"), sys.stderr
    os.dup2(2, 1)
    settings = json.loads(sys.stdin.readline())
    cores = sorted(os.sched_getaffinity(0))
    pin(cores[0])  # before torch is imported: its threads inherit the affinity
    import torch

    torch.set_num_threads(1)
    costs = {}
    for key, cell in settings["cells"].items():
        with Stage.of(cores[0], cores[1], os.getpid()) as stage:
            costs[key] = asdict(calibrate(stage, settings, cell))
    print(json.dumps(costs), file=output, flush=True)


if __name__ == "__main__":
    main()
