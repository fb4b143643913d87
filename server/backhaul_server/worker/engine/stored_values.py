"""The values that a worker's store holds by address: tensors and programs."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from backhaul_runtime.program.program import Program
from backhaul_runtime.tensors.layout import layout_of, payload
from backhaul_runtime.tensors.staging import is_staged
from backhaul_server.worker.engine.store import collision


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
    """Whether two values of the same address are equal, bit by bit. Waits for an accelerator."""
    if isinstance(one, ReadProgram) or isinstance(other, ReadProgram):
        return isinstance(one, ReadProgram) and isinstance(other, ReadProgram) and one.digest == other.digest
    layout = layout_of(one)
    return layout == layout_of(other) and torch.equal(payload(one.detach(), layout), payload(other.detach(), layout))


def is_same_at_once(one: StoredValue, other: StoredValue) -> bool:
    """Returns what `is_same` does. For tensors on an accelerator, for which that would wait, returns False."""
    has_to_wait = isinstance(one, Tensor) and is_staged(one.device)
    return not has_to_wait and is_same(one, other)


def check_all_same(pairs: Iterable[tuple[bytes, StoredValue, StoredValue]]) -> None:
    """Raises TransferError if the two values of an address differ, for any address. Waits for an accelerator."""
    for address, one, other in pairs:
        if not is_same(one, other):
            raise collision(address)
