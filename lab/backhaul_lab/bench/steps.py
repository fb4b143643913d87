"""Measures steps of 8 blocks at 1,024 tokens without checkpointing, with torch's and with Backhaul in three ways."""

import torch
from torch import Tensor

from backhaul import Settings
from backhaul.demo.model import Block
from backhaul.demo.peak_memory import live_bytes
from backhaul_lab.bench.outcomes import Outcome, of_rounds
from backhaul_lab.bench.overlap import exposed_by_step
from backhaul_lab.harness.device import measured
from backhaul_lab.harness.rounds import Plan, Rounds, ratio_of
from backhaul_lab.harness.stage import Stage
from backhaul_lab.harness.training import DROPOUT, LARGE, WIDTH, BlockTraining, checkpoint_of_torch, take_turns

BLOCKS = 8
ROOM = 4
"""Number of recomputed segments that fit into the small worker's memory."""
PLAN = Plan(most=10, limit_s=150.0)
STEPS_PER_ROUND = 2
"""The first step of a round is the lead-in, the second is timed."""


def measure(stage: Stage) -> list[Outcome]:
    """Measures the step_ figures and exposed_recompute."""
    # Each session has a worker of its own: a shared one would already store the tensors that later sessions send.
    sessions = {
        "gradients": stage.session(returns="gradients"),
        "graphs": stage.session(returns="gradients", graphs="eager"),
        "activations": stage.session(returns="activations"),
        "half": stage.session(returns="gradients", settings=Settings(memory_bytes=half_budget_bytes())),
    }
    trainings = [
        BlockTraining("none", BLOCKS, LARGE, None),
        BlockTraining("torch", BLOCKS, LARGE, checkpoint_of_torch),
        *(BlockTraining(name, BLOCKS, LARGE, session.checkpoint) for name, session in sessions.items()),
    ]
    rounds = take_turns(trainings, stage.cores, PLAN)
    notes = {name: on_trainer(session.report().fallbacks) for name, session in sessions.items()}
    return [
        of_rounds("step_vs_torch_gradients", rounds, ratio_of("gradients", "torch"), notes["gradients"]),
        of_rounds("step_vs_torch_activations", rounds, ratio_of("activations", "torch"), notes["activations"]),
        of_rounds("step_vs_none_gradients", rounds, ratio_of("gradients", "none"), notes["gradients"]),
        of_rounds("step_vs_none_graphs", rounds, ratio_of("graphs", "none"), notes["graphs"]),
        of_rounds("step_half_budget", rounds, ratio_of("half", "none"), notes["half"]),
        of_rounds("exposed_recompute", _exposed(sessions["gradients"].workers, rounds), lambda taken: taken["exposed"]),
    ]


def on_trainer(fallbacks: int) -> str:
    """Returns a note about segments that the trainer recomputed, empty if there were none."""
    return f"{fallbacks} segments fell back to the trainer" if fallbacks else ""


def half_budget_bytes() -> int:
    """Returns a worker's memory for the weights, the boundaries, ROOM recomputed segments and one segment's gradients.

    It includes the weights and boundaries of ROOM more segments, which arrive before the old ones are freed.
    """
    block = Block(WIDTH, DROPOUT).to(measured())
    x = torch.randn(*LARGE, WIDTH, device=measured(), requires_grad=True)
    outputs: list[Tensor] = []
    saved = live_bytes(lambda: outputs.append(block(x)))[-1][1]  # `outputs` keeps the saved tensors alive.
    weights = sum(parameter.nbytes for parameter in block.parameters())
    return (BLOCKS + ROOM) * (weights + x.nbytes) + ROOM * saved + weights + 2 * x.nbytes


def _exposed(worker: str, rounds: Rounds) -> Rounds:
    """Returns the same rounds with the exposed fraction of the timed step's recomputation."""
    by_step = exposed_by_step(worker)
    timed = by_step[PLAN.warm * STEPS_PER_ROUND + STEPS_PER_ROUND - 1 :: STEPS_PER_ROUND]
    with_exposed = Rounds()
    for exposed, (_, is_quiet) in zip(timed, rounds.measured, strict=True):
        with_exposed.add({"exposed": exposed}, is_quiet=is_quiet)
    return with_exposed
