"""A block whose calls are compiled segments, the two ways to compile it, and what a report says of them."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backhaul._backend import backend
from backhaul._observe.report import SegmentReport
from support.bits import Checkpoint, seed_generators
from support.devices import DEVICE
from support.loopback import Loopback

# torch.compile looks whether inputs have gradients, and hides the warning by a way that pytest's filter does not know.
MARKS = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.usefixtures("fresh_compiler"),
]
WIDTH = 8
SCALES = {"global": 1.5}


class Block(nn.Module):
    """Has everything that a test changes between two calls."""

    mask: Tensor
    norm: nn.Module

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.scale, self.power, self.kind, self.is_gated = 0.5, 2, "gelu", True
        self.factors = {"first": 1.25, "second": 0.75}
        self.register_buffer("mask", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = getattr(nn.functional, self.kind)(self.up(self.norm(x)))
        y = nn.functional.dropout(self.down(y), 0.3, self.training)
        if self.is_gated:
            y = y * torch.sigmoid(x) * self.mask
        for factor in self.factors.values():
            y = (y * factor).to(torch.float32).tanh().to(y.dtype)
        out: Tensor = x + y.pow(self.power) * self.scale * SCALES["global"]
        return out


def own(remote: Loopback, **options: Any) -> Checkpoint:
    """Backhaul compiles."""
    return functools.partial(remote.checkpoint, graphs="eager", **options)


def user(remote: Loopback) -> Checkpoint:
    """The user has compiled."""
    compiled: dict[int, Any] = {}

    def run(block: Any, *args: Any, **kwargs: Any) -> Any:
        if id(block) not in compiled:
            compiled[id(block)] = torch.compile(block, backend=backend)
        return remote.checkpoint(compiled[id(block)], *args, **kwargs)

    return run


WAYS = pytest.mark.parametrize("way", [own, user])


def step(checkpoint: Checkpoint, block: Any, x: Tensor, seed: int = 0) -> list[Tensor | None]:
    """The output of two calls, the gradients, and what the generator gives afterwards."""
    seed_generators(seed)
    block.zero_grad()
    x = x.detach().requires_grad_(x.requires_grad)
    y = checkpoint(block, checkpoint(block, x * 1))
    if y.requires_grad:
        y.float().square().sum().backward()
    return [y.detach(), x.grad, *(parameter.grad for parameter in block.parameters()), torch.rand(3)]


def inputs(*shape: int) -> Tensor:
    return torch.randn(*(shape or (2, 3, WIDTH)), device=DEVICE, requires_grad=True)


def block_like(seed: int = 0) -> Block:
    torch.manual_seed(seed)
    return Block().to(DEVICE)


def reported(remote: Loopback) -> SegmentReport:
    (segment,) = [segment for segment in remote.report().segments if segment.name == "Block"]
    return segment


def known(remote: Loopback) -> int:
    return sum(segment.known for segment in remote.report().segments)
