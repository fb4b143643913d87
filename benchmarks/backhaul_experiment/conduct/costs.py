"""Measures what segments cost, in a process of its own, once for an experiment."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from typing import Any

from backhaul_experiment.nodes.fabric import ENVIRONMENT
from backhaul_experiment.plan.spec import Experiment
from backhaul_experiment.report.predictions import kind_of

_LIMIT_S, _CORES = 240.0, 2


def measure_costs(experiment: Experiment) -> dict[str, Any]:
    """Returns the costs of each kind of segment in the cells, and why there are none otherwise."""
    if not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < _CORES:
        return {"why": f"measuring costs needs Linux and {_CORES} cores", "costs": {}}
    cells = {kind_of(cell.values): dict(cell.values) for cell in (*experiment.matrix.cells, *experiment.simulated)}
    settings = {"model": asdict(experiment.model), "seed": experiment.seed, "cells": cells}
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "backhaul_experiment.training.calibration"],
            input=json.dumps(settings) + "\n",
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=False,
            env={**os.environ, **ENVIRONMENT},
        )
    except subprocess.TimeoutExpired:
        return {"why": f"measuring costs took longer than {_LIMIT_S:g} s", "costs": {}}
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        return {"why": f"the costs of a segment could not be measured: {last[0]}", "costs": {}}
    return {"why": "", "costs": json.loads(done.stdout.splitlines()[-1])}
