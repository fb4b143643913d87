"""A worker runs no custom autograd function whose backward would read something else there than on the trainer."""

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from backhaul import Decision
from support import function_reads as reads
from support.bits import plainly, same_bits
from support.devices import on_the_host
from support.function_calls import checkpointing, trained
from support.loopback import Loopback

CHANGES: dict[str, Callable[[pytest.MonkeyPatch], object]] = {
    "ByMixed": lambda patch: patch.setitem(reads.MIXED, "slope", 0.125),
    "ByLong": lambda patch: patch.setattr(reads, "LONG", [0.125] * 2_000),
    "ByDeep": lambda patch: patch.setitem(reads.DEEP["a"]["b"]["c"]["d"], "slope", 0.125),
    "ByDictInTuple": lambda patch: patch.setitem(reads.PAIR[1], "slope", 0.125),
    "ByQueue": lambda patch: patch.setattr(reads, "QUEUE", deque([0.125])),
    "ByArrays": lambda patch: patch.setitem(reads.ARRAYS, "slopes", np.array([0.125])),
    "ByNumber": lambda patch: patch.setattr(reads, "NUMBER", reads.Number(0.125)),
    "BySlots": lambda patch: patch.setattr(reads.SLOTTED, "slope", 0.125),
    "ByListed": lambda patch: patch.setattr(reads.LISTED[0], "slope", 0.125),
    "ByMethod": lambda patch: patch.setattr(reads.METHOD.__self__, "slope", 0.125),  # type: ignore[attr-defined]
    "ByMeta": lambda patch: patch.setattr(reads.Meta, "slope", 0.125),
    "ByCached": lambda patch: patch.setattr(reads, "SLOPE", 0.125),
    "ByDefault": lambda patch: patch.setitem(reads.by_default.__defaults__[0], "slope", 0.125),  # type: ignore[index]
    "ByCode": lambda patch: patch.setattr(reads.by_code, "__code__", reads.other_code.__code__),
    "ByAttribute": lambda patch: patch.setattr(reads.by_attribute, "slope", 0.125),
    "ByHooks": lambda patch: patch.setattr(reads, "SLOPE", 0.125),
    "ByAlias": lambda patch: patch.setattr(reads, "SLOPE", 0.125),
    "ByText": lambda patch: patch.setattr(reads, "SLOPE", 0.125),
}


ALLOWED = ["support.function_reads"]


def _body(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    function = getattr(reads, name)
    return lambda h, w: function.apply(h.sin() * w).cos()


@pytest.mark.parametrize("name", CHANGES)
def test_a_number_is_compared_wherever_backward_reads_it(
    name: str, remote: Loopback, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker here is the same process, so what it offered is from before the change."""
    trained(_body(name), checkpointing(remote, returns="gradients"))
    (segment,) = remote.report().segments
    assert segment.decisions == {Decision.GRADIENTS: 2}
    CHANGES[name](monkeypatch)
    same_bits(trained(_body(name), checkpointing(remote)), trained(_body(name), plainly))
    *_, segment = remote.report().segments
    assert ["a value that it reads" in reason for reason in segment.kept] == [True]


@pytest.mark.parametrize("name", CHANGES)
def test_a_number_may_change_between_forward_and_backward(
    name: str, remote: Loopback, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.arange(4.0).requires_grad_()
    y = remote.checkpoint(lambda h: getattr(reads, name).apply(h), x, returns="gradients")
    CHANGES[name](monkeypatch)
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((4,), 0.125))
    (segment,) = remote.report().segments
    assert ["was changed after forward" in reason for reason in segment.reasons] == [True]


@pytest.mark.parametrize(
    "name", [pytest.param("ByLocal", marks=on_the_host("another thread runs backward on a GPU")), "ByObjects"]
)
def test_what_can_not_be_compared_keeps_a_function_on_the_trainer(name: str, remote: Loopback) -> None:
    same_bits(trained(_body(name), checkpointing(remote)), trained(_body(name), plainly))
    (segment,) = remote.report().segments
    assert ["that can't be compared" in reason for reason in segment.kept] == [True]


@pytest.mark.parametrize("name", ["BySparseInDict", "BeyondPart"])
def test_a_tensor_that_is_not_compared_as_a_whole_is_read_on_the_trainer(name: str, remote: Loopback) -> None:
    same_bits(trained(_body(name), checkpointing(remote, returns="gradients")), trained(_body(name), plainly))
    (segment,) = remote.report().segments
    assert Decision.GRADIENTS not in segment.decisions
    assert any("not compared with the trainer's" in reason for reason in segment.reasons)


@pytest.mark.parametrize("name", ["Keeping", "Saving"])
@pytest.mark.parametrize("returns", ["gradients", "activations"])
def test_a_context_that_keeps_a_tensor_of_others_stays_on_the_trainer(
    name: str, returns: str, remote: Loopback
) -> None:
    """Others may change the tensor before backward reads it, and backward may write to it."""

    def kept(checkpoint: Any) -> list[Tensor | None]:
        slopes = reads.KEPT["slopes"].fill_(0.5)
        x = torch.arange(4.0).requires_grad_()
        y = checkpoint(lambda h: getattr(reads, name).apply(h.sin()).cos(), x)
        slopes.data.mul_(5)
        y.sum().backward()
        return [x.grad, slopes.clone()]

    same_bits(kept(checkpointing(remote, returns=returns)), kept(plainly))
    (segment,) = remote.report().segments
    assert ["keeps a tensor that is not among its arguments" in reason for reason in segment.kept] == [True]
