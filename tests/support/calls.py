"""Checkpointed calls seen from outside: what they are given, how often they run, what of them stays alive."""

import random
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from backhaul import Decision, Session
from backhaul._backward.frame import RecordedSegment
from support.bits import Checkpoint, differing, plainly, seed_generators

WIDTH = 8
# Torch 2.11 saved what a checkpoint is given by a custom function: transforms refuse that in words of their own, and a
# context that swallows an exception was not noticed. So there is nothing to compare with in these places.
SAVES_BY_CUSTOM_FUNCTION = hasattr(torch.utils.checkpoint, "_NoopSaveInputs")
torch_checkpoint: Checkpoint = partial(checkpoint, use_reentrant=False)


class TimesOne(torch.autograd.Function):
    """What a program can't carry: activations of a function that begins with it stay on the trainer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * torch.ones_like(x)


class Counted(nn.Module):
    """A layer that counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x).tanh()


def one() -> Tensor:
    return torch.ones((), requires_grad=True)


def inputs() -> tuple[Tensor, Tensor]:
    """A leaf and a non-leaf made from it, [2, 8]."""
    x = torch.randn(2, WIDTH, requires_grad=True)
    return x, x * 1.0


def seed() -> None:
    seed_generators(1)
    random.seed(1)
    np.random.seed(1)


def same(case: Callable[[Checkpoint], list[Tensor | None]], checkpoint: Checkpoint) -> None:
    """The case gives the same bits as without checkpointing."""
    seed()
    expected = case(plainly)
    seed()
    assert differing(case(checkpoint), expected) == []


def as_without_checkpointing(test: Callable[..., list[Tensor | None]]) -> Callable[..., None]:
    """Makes a test of a function whose results must have the same bits as without checkpointing.

    The function gets the way to checkpoint from the fixture `anywhere` or `checkpoint`, and runs once more plainly.
    """

    @wraps(test)
    def compared(**fixtures: Any) -> None:
        name = "anywhere" if "anywhere" in fixtures else "checkpoint"
        same(lambda checkpoint: test(**{**fixtures, name: checkpoint}), fixtures[name])

    return compared


def recomputations(session: Session) -> int:
    """How many segments were recomputed so far, by whomever."""
    decisions = [item for segment in session.report().segments for item in segment.decisions.items()]
    return sum(count for decision, count in decisions if decision is not Decision.KEPT)


def recorded_ops(session: Session, patch: pytest.MonkeyPatch) -> list[list[str]]:
    """Gets the ops of each program that the session sends from now on."""
    programs: list[list[str]] = []
    save = session._dispatcher.save

    def note(segment: RecordedSegment, *given: Any) -> Any:
        programs.append([node.op for node in segment.program.nodes])
        return save(segment, *given)

    patch.setattr(session._dispatcher, "save", note)
    return programs


def memory_of(tensor: Tensor) -> StorageWeakRef:
    """Tells whether a tensor's memory is still there, and doesn't keep it."""
    return StorageWeakRef(tensor.untyped_storage())


def nodes_behind(output: Tensor) -> set[str]:
    """Names of the nodes in an output's graph."""
    waiting, seen = [output.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
    return {node.name() for node in seen}


def sines(x: Tensor) -> Tensor:
    return x.sin().sin().sin()
