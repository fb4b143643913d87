"""Steps of 8 blocks at 1,024 tokens: without checkpointing, with torch's, and with Backhaul in three ways."""

import torch
from torch import Tensor

from backhaul.demo.memory import live_bytes
from backhaul.demo.model import Block
from backhaul_bench.device import measured
from backhaul_bench.outcomes import Outcome, of_rounds
from backhaul_bench.overlap import exposed_by_step
from backhaul_bench.rounds import Alternative, Plan, Rounds, interleave, ratio_of
from backhaul_bench.stage import Stage
from backhaul_bench.training import DROPOUT, LARGE, WIDTH, Training, checkpoint_of_torch, compare

BLOCKS = 8
ROOM = 4
"""Segments whose recomputation the small worker has room for."""
PLAN = Plan(most=12, limit_s=260.0)
STEPS_PER_ROUND = 2
"""One leads in, one is timed."""


def measure(stage: Stage) -> list[Outcome]:
    """The step_ figures and exposed_recompute."""
    # A worker each: one would have from the first session what the others are to send.
    sessions = {
        "gradients": stage.session(returns="gradients"),
        "activations": stage.session(returns="activations"),
        "half": stage.session(returns="gradients", memory_bytes=half_budget_bytes()),
    }
    trainings = [
        Training("none", BLOCKS, LARGE, None),
        Training("torch", BLOCKS, LARGE, checkpoint_of_torch),
        *(Training(name, BLOCKS, LARGE, session.checkpoint) for name, session in sessions.items()),
    ]
    variants = [Alternative(training.name, training.step, training.step) for training in trainings]
    rounds = interleave(variants, stage.cores, PLAN, lambda: compare(trainings))
    notes = {name: on_trainer(session.report().fallbacks) for name, session in sessions.items()}
    return [
        of_rounds("step_vs_torch_gradients", rounds, ratio_of("gradients", "torch"), notes["gradients"]),
        of_rounds("step_vs_torch_activations", rounds, ratio_of("activations", "torch"), notes["activations"]),
        of_rounds("step_vs_none_gradients", rounds, ratio_of("gradients", "none"), notes["gradients"]),
        of_rounds("step_half_budget", rounds, ratio_of("half", "none"), notes["half"]),
        of_rounds("exposed_recompute", _exposed(sessions["gradients"].workers, rounds), lambda taken: taken["exposed"]),
    ]


def on_trainer(fallbacks: int) -> str:
    """A note where the trainer did what a worker was meant to do."""
    return f"{fallbacks} segments fell back to the trainer" if fallbacks else ""


def half_budget_bytes() -> int:
    """What a worker needs for the weights, the boundaries, ROOM recomputed segments and one segment's gradients.

    And for as many segments' weights and boundaries more: new ones come while the old are still there.
    """
    block = Block(WIDTH, DROPOUT).to(measured())
    x = torch.randn(*LARGE, WIDTH, device=measured(), requires_grad=True)
    kept: list[Tensor] = []
    saved = live_bytes(lambda: kept.append(block(x)))[-1][1]  # while its output lives, so does what autograd saved
    weights = sum(parameter.nbytes for parameter in block.parameters())
    return (BLOCKS + ROOM) * (weights + x.nbytes) + ROOM * saved + weights + 2 * x.nbytes


def _exposed(worker: str, rounds: Rounds) -> Rounds:
    """The same rounds, with what part of the timed step's recomputation was exposed."""
    by_step = exposed_by_step(worker)
    timed = by_step[PLAN.warm * STEPS_PER_ROUND + STEPS_PER_ROUND - 1 :: STEPS_PER_ROUND]
    found = Rounds()
    for exposed, (_, is_quiet) in zip(timed, rounds.found, strict=True):
        found.add({"exposed": exposed}, is_quiet=is_quiet)
    return found
