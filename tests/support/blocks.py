"""Accumulation blocks beside loops of `loss.backward()`, whose bits they must have."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backhaul import Session
from backhaul._config import Local
from support.bits import Checkpoint, differing, grad_of, plainly

SEGMENTS, WIDTH = 4, 32


@contextmanager
def loop(**_: Any) -> Iterator[Any]:
    """Stands for `session.accumulate` in a loop, in which each backward runs at once."""
    yield SimpleNamespace(backward=Tensor.backward)


def as_in_a_loop(test: Callable[[Checkpoint, Any], list[Any]]) -> Callable[[Session], None]:
    """Makes a test of a function that trains, given a way to checkpoint and one to open blocks: both ways are equal."""

    def compared(session: Session) -> None:
        torch.manual_seed(0)
        ours = test(session.checkpoint, session.accumulate)
        torch.manual_seed(0)
        assert differing(ours, test(plainly, loop)) == []

    return compared


def take_last(monkeypatch: pytest.MonkeyPatch, session: Session, local: Local, *last: int) -> None:
    """Lets the trainer compute so many of the last segments of each micro-batch of a block."""
    chosen = dict(enumerate(last, 1))
    monkeypatch.setattr(
        session._shares[local], "last_segments", lambda micro_batch, parts, left, own: chosen.get(micro_batch, 0)
    )


def halve_gradient(parameter: Tensor) -> None:
    grad_of(parameter).mul_(0.5)


class Model(nn.Module):
    """An embedding, segments and a head. `kind` says what is unusual about it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embedding, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.linears = [nn.Linear(WIDTH, WIDTH) for _ in range(SEGMENTS)]
        if kind in ("tied to the head", "hook between the head and its tied weight"):
            self.head.weight = self.embedding.weight
        if kind == "tied segments":
            for linear in self.linears:
                linear.weight = self.embedding.weight
        norm = nn.BatchNorm1d if kind == "BatchNorm" else nn.LayerNorm
        self.segments = nn.ModuleList(
            nn.Sequential(norm(WIDTH), linear, nn.SiLU() if kind == "SiLU" else nn.GELU(), nn.Dropout(0.1))
            for linear in self.linears
        )
        self.scale = nn.Parameter(torch.ones(WIDTH))
        if kind == "hooks on parameters":
            self.embedding.weight.register_hook(lambda gradient: gradient * 1.5)
            self.linears[1].weight.register_hook(lambda gradient: gradient + 0.125)
            self.head.bias.register_post_accumulate_grad_hook(halve_gradient)
        if kind == "frozen":
            for parameter in self.parameters():
                parameter.requires_grad_(False)
            for linear in self.linears:
                linear.bias.requires_grad_()

    def loss(self, checkpoint: Checkpoint, x: Tensor) -> Tensor:
        first = y = self.embedding(x)
        auxiliary: Tensor | float = 0.0
        for number, segment in enumerate(self.segments):
            y = checkpoint(segment, y)
            if self.kind == "operations between":
                y = y * self.scale + 1
            if self.kind == "auxiliary loss" and number == 1:
                auxiliary = y.square().mean()
            if self.kind == "hook on a boundary" and number == 1:
                y.register_hook(lambda gradient: gradient * 1.25)
            if self.kind == "skip":
                y = y + first
        if self.kind == "skip around":
            y = y + first
        if self.kind == "operation that skips around":
            y = y + first.sin()
        if self.kind == "scale of the last boundary":
            y = y * self.scale * self.linears[0].bias
        if self.kind == "hook between the head and its tied weight":
            weight = self.head.weight.t()
            weight.register_hook(lambda gradient: gradient * 2)
            return (y @ weight).square().mean()
        if self.kind == "hook in the head":
            weight = self.head.weight.t()
            weight.register_hook(lambda gradient: gradient * 2)
            y = y @ weight
        return self.head(y).square().mean() + auxiliary


DIVIDED = [
    "plain",
    "tied to the head",
    "tied segments",
    "hooks on parameters",
    "hook in the head",
    "BatchNorm",
    "frozen",
    "hook on a boundary",
]
"""The kinds whose segments run their backward while the trainer goes on."""

_USED_AFTERWARDS = "a tensor that a segment takes or returns is used after the last segment as well"
_WEIGHT_USED_AFTERWARDS = "an operation after the last segment uses a parameter of a segment"
BLOCKING = {
    "hook between the head and its tied weight": "a tensor computed from a parameter of a segment has a hook",
    "operations between": _WEIGHT_USED_AFTERWARDS,
    "auxiliary loss": _USED_AFTERWARDS,
    "skip": _USED_AFTERWARDS,
    "skip around": _USED_AFTERWARDS,
    "operation that skips around": _USED_AFTERWARDS,
    "scale of the last boundary": _WEIGHT_USED_AFTERWARDS,
}
"""The kinds whose backward does not wait for the worker, each with the beginning of the reason."""


def train(
    checkpoint: Checkpoint,
    accumulate: Any = loop,
    kind: str = "plain",
    micro_batches: int = 3,
    steps: int = 3,
    optimizer: Any = torch.optim.AdamW,
    happen: Callable[[int, Any], None] = lambda number, block: None,
    **options: Any,
) -> list[Tensor | None]:
    """Returns losses, gradients of each step, buffers and parameters. Every other step begins with gradients."""
    torch.manual_seed(0)
    model = Model(kind)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    stepper = optimizer(parameters, lr=0.01, **options)
    results: list[Tensor | None] = []
    for step in range(steps):
        with accumulate() as block:
            for number in range(micro_batches):
                happen(number, block)
                loss = model.loss(checkpoint, torch.randn(8, WIDTH)) / micro_batches
                results.append(loss.detach())
                block.backward(loss)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        results += [None if parameter.grad is None else parameter.grad.clone() for parameter in parameters]
        stepper.step()
        if step % 2 == 0:
            stepper.zero_grad()
    return [*results, *(tensor.detach().clone() for tensor in model.state_dict().values()), torch.get_rng_state()]


def trained(session: Session, **options: Any) -> list[Tensor | None]:
    return train(session.checkpoint, session.accumulate, **options)
