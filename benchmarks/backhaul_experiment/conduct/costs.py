"""Measures what segments cost, in a process of its own, once for an experiment."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict
from typing import Any

from backhaul_experiment.nodes.fabric import ENVIRONMENT
from backhaul_experiment.nodes.network import WITH_ITS_PARENT
from backhaul_experiment.plan.spec import Experiment
from backhaul_experiment.report.predictions import kind_of

_FIRST_S, _EACH_S, _CORES = 180.0, 60.0, 2
"""Seconds that measuring may take, and seconds more for each kind of segment."""
_CALIBRATION = "backhaul_experiment.training.calibration"


def measure_costs(experiment: Experiment) -> dict[str, Any]:
    """Returns the costs of each kind of segment in the cells, and why there are none otherwise."""
    if not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < _CORES:
        return {"why": f"measuring costs needs Linux and {_CORES} cores", "costs": {}}
    cells = {kind_of(cell.values): dict(cell.values) for cell in (*experiment.matrix.cells, *experiment.simulated)}
    settings = {"model": asdict(experiment.model), "seed": experiment.seed, "cells": cells}
    limit_s = _FIRST_S + _EACH_S * len(cells)
    try:
        done = subprocess.run(
            [*WITH_ITS_PARENT * bool(shutil.which(WITH_ITS_PARENT[0])), sys.executable, "-P", "-m", _CALIBRATION],
            input=json.dumps(settings) + "\n",
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
            env={**os.environ, **ENVIRONMENT},
        )
    except subprocess.TimeoutExpired:
        return {"why": f"measuring costs took longer than {limit_s:g} s", "costs": {}}
    last = done.stderr.strip().splitlines()[-1:] or ["no message"]
    try:
        if not done.returncode:
            return {"why": "", "costs": json.loads(done.stdout)}
    except ValueError as error:
        last = [str(error)]
    return {"why": f"the costs of a segment could not be measured: {last[0]}", "costs": {}}
