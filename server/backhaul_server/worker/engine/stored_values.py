"""What the store of a worker holds by address: tensors and programs."""

from dataclasses import dataclass

import torch
from torch import Tensor

from backhaul_runtime.program.program import Program
from backhaul_runtime.tensors.layout import layout_of, payload


@dataclass(frozen=True, slots=True)
class ReadProgram:
    """A program that was sent.

    Attributes:
        program: The program, checked.
        digest: The SHA-256 of its encoding: two programs of one address are compared by it.
    """

    program: Program
    digest: bytes


Held = Tensor | ReadProgram
"""What the store of a worker holds under addresses."""


def is_same(one: Held, other: Held) -> bool:
    """Whether two that have the same address are equal, bit by bit."""
    if isinstance(one, ReadProgram) or isinstance(other, ReadProgram):
        return isinstance(one, ReadProgram) and isinstance(other, ReadProgram) and one.digest == other.digest
    layout = layout_of(one)
    return layout == layout_of(other) and torch.equal(payload(one.detach(), layout), payload(other.detach(), layout))
