"""The values that a worker's store holds by address: tensors and programs."""

from dataclasses import dataclass

import torch
from torch import Tensor

from backhaul_runtime.program.program import Program
from backhaul_runtime.tensors.layout import layout_of, payload


@dataclass(frozen=True, slots=True)
class ReadProgram:
    """A program that a trainer has sent, decoded and checked.

    Attributes:
        program: The checked program, ready to run.
        digest: SHA-256 of the encoding, by which two programs of one address are compared.
    """

    program: Program
    digest: bytes


StoredValue = Tensor | ReadProgram
"""A value of the store."""


def is_same(one: StoredValue, other: StoredValue) -> bool:
    """Whether two values of the same address are equal, bit by bit."""
    if isinstance(one, ReadProgram) or isinstance(other, ReadProgram):
        return isinstance(one, ReadProgram) and isinstance(other, ReadProgram) and one.digest == other.digest
    layout = layout_of(one)
    return layout == layout_of(other) and torch.equal(payload(one.detach(), layout), payload(other.detach(), layout))
