"""Measures the backward of one block by Backhaul's worker and by hivemind's RemoteExpert."""

import os
import subprocess
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter

from torch import Tensor

from backhaul_lab.bench import hivemind_side
from backhaul_lab.bench.figures import Verdict
from backhaul_lab.bench.outcomes import Outcome, of_rounds, without_value
from backhaul_lab.bench.steps import on_trainer
from backhaul_lab.harness.core_times import Core, settle
from backhaul_lab.harness.machine import HIVEMIND
from backhaul_lab.harness.processes import ChildError, ChildProcess
from backhaul_lab.harness.rounds import Alternative, Plan, UnequalGradientsError, interleave, ratio_of
from backhaul_lab.harness.stage import Stage

CALLS = 4
"""Calls timed together, because one alone is too short to detect disturbances."""
PLAN = Plan(most=15, warm=1, limit_s=30.0)
_ANSWER_S = 30.0
_START_S, _STARTS = 20.0, 8
"""Seconds that a peer of hivemind may take to start, and how often that is tried. It starts in 2 seconds, or never: in
about one of three starts a process that it forks waits for a lock that no thread of that process holds."""


def measure(stage: Stage) -> list[Outcome]:
    """Measures the figure vs_hivemind."""
    python = os.environ.get(HIVEMIND, "")
    if not python or subprocess.run([python, "-c", "import hivemind"], capture_output=True, check=False).returncode:
        reason = f'"{python}" does not have hivemind' if python else "no --hivemind PYTHON is given"
        return [without_value("vs_hivemind", Verdict.UNAVAILABLE, reason)]
    model = find_spec("backhaul.demo.model")
    assert model is not None
    assert model.origin is not None
    script = [python, "-P", str(Path(hivemind_side.__file__)), "server", model.origin]
    try:
        _, address = _started(stage, script, stage.worker)
        client, _ = _started(stage, [*script[:-2], "client", model.origin, address], stage.trainer)
    except ChildError as error:
        return [without_value("vs_hivemind", Verdict.UNAVAILABLE, str(error))]
    session = stage.session(returns="gradients")
    block = hivemind_side.block_of(model.origin)
    x, gradient = hivemind_side.tensors()
    digests: dict[str, str] = {}

    def ours() -> float:
        taken_s = 0.0
        for _ in range(CALLS):
            taken_s += _backward(session.checkpoint(block, x), x, gradient, stage)
        assert x.grad is not None
        digests["backhaul"] = hivemind_side.digest(x.grad)
        return taken_s

    def theirs() -> float:
        taken_s = 0.0
        for _ in range(CALLS):
            client.write("backward")
            taken, digests["hivemind"] = client.read(_ANSWER_S).split()
            taken_s += float(taken)
        return taken_s

    def compare() -> None:
        if digests["backhaul"] != digests["hivemind"]:
            raise UnequalGradientsError("hivemind and backhaul computed different gradients of the input")

    rounds = interleave([Alternative("backhaul", ours), Alternative("hivemind", theirs)], stage.cores, PLAN, compare)
    return [of_rounds("vs_hivemind", rounds, ratio_of("backhaul", "hivemind"), on_trainer(session.report().fallbacks))]


def _started(stage: Stage, command: list[str], core: Core) -> tuple[ChildProcess, str]:
    """Starts a peer of hivemind. Returns its process and its first line. Raises ChildError if no start succeeds."""
    for _ in range(_STARTS - 1):
        with suppress(ChildError):
            return stage.start(command, core, timeout_s=_START_S)
    return stage.start(command, core, timeout_s=_START_S)


def _backward(y: Tensor, x: Tensor, gradient: Tensor, stage: Stage) -> float:
    settle(stage.cores)  # The upload and all speculative work are finished.
    x.grad = None
    began_s = perf_counter()
    y.backward(gradient)  # type: ignore[no-untyped-call]
    return perf_counter() - began_s
