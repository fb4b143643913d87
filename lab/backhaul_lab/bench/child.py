"""The process that measures one group. It pins itself, measures and answers with the outcomes.

`python -m backhaul_lab.bench.child GROUP TRAINER_CORE WORKER_CORE` answers with one line of JSON.
"""

import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict
from importlib import import_module

from backhaul_lab.bench.figures import FIGURES, Verdict
from backhaul_lab.bench.groups import GROUPS
from backhaul_lab.bench.outcomes import Outcome, without_value
from backhaul_lab.harness.core_times import pin
from backhaul_lab.harness.device import make_deterministic
from backhaul_lab.harness.processes import answers_only
from backhaul_lab.harness.rounds import UnequalGradientsError
from backhaul_lab.harness.stage import Stage

Measure = Callable[[Stage], list[Outcome]]


def measure(group: str, stage: Stage) -> list[Outcome]:
    """Returns the outcomes of a group. If gradients were not equal, all of them are failed and have no value."""
    module, _, function = GROUPS[group].function.partition(":")
    measure_group: Measure = getattr(import_module(f"backhaul_lab.bench.{module}"), function)
    try:
        return measure_group(stage)
    except UnequalGradientsError as error:
        return [without_value(figure.name, Verdict.FAILED, str(error)) for figure in FIGURES if figure.group == group]


def main(group: str, trainer_core: str, worker_core: str) -> None:
    """Measures a group on two cores and writes the outcomes as JSON."""
    output = answers_only()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # Unwinds, so that the stage ends its processes.
    pin(int(trainer_core))  # Before torch is imported, because its threads inherit the affinity.
    import torch

    torch.set_num_threads(1)
    make_deterministic()
    with Stage.of(int(trainer_core), int(worker_core), os.getpid()) as stage:
        outcomes = measure(group, stage)
    print(json.dumps([asdict(outcome) for outcome in outcomes]), file=output, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
