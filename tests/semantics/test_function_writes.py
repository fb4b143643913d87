"""Custom autograd functions whose backward writes to memory of others: as plain training, or an error that names it."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backhaul import Decision, ReplayError
from support import function_writes
from support.bits import Checkpoint, plainly, same_bits
from support.devices import on_the_host
from support.function_calls import WIDTH, checkpointing
from support.loopback import Loopback

BY_NUMPY = on_the_host("NumPy sees no memory of a device")


ALLOWED = ["support.function_writes"]


@pytest.fixture
def remote(remote: Loopback) -> Iterator[Loopback]:
    """The functions of these tests may write to what the worker was given."""
    yield remote
    remote.given.clear()


def steps(function: Any, checkpoint: Checkpoint, *, is_last: bool = False, captures: bool = False) -> list[Any]:
    """Returns what three steps of two segments compute, and all that they may have written to."""
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(WIDTH)) for _ in range(2)]
    x = torch.randn(4, WIDTH, requires_grad=True)

    def body(h: Tensor, w: Tensor) -> Tensor:
        y: Tensor = function.apply(h if is_last else h.sin(), w)
        return y if is_last else y.cos()

    results: list[Any] = []
    for _ in range(3):
        h, passed = x.cos(), list[Tensor]()
        for weight in weights:
            h = checkpoint(lambda h, weight=weight: body(h, weight), h) if captures else checkpoint(body, h, weight)
            passed.append(h)
        h.square().sum().backward()
        results += [x.grad, *(weight.grad for weight in weights)]
        results += [tensor.detach().clone() for tensor in (*passed, *weights)]
        for leaf in (x, *weights):
            leaf.grad = None
    return results


@pytest.mark.parametrize("returns", ["gradients", "activations"])
@pytest.mark.parametrize(
    ("name", "is_last"),
    [("WritesWeight", False), ("WritesInput", True), ("WritesOutput", True)],
)
def test_a_write_to_an_argument_or_output_is_an_error_once(
    name: str, is_last: bool, returns: str, remote: Loopback
) -> None:
    """A recomputation has copies of these. Then the function stays on the trainer, where nothing differs."""
    function = getattr(function_writes, name)
    ours = checkpointing(remote, returns=returns)
    with pytest.raises(ReplayError, match=f"{name} has written to an? .*run forward again"):
        steps(function, ours, is_last=is_last)
    same_bits(steps(function, ours, is_last=is_last), steps(function, plainly, is_last=is_last))


@pytest.mark.parametrize("is_allowed", [True, False], ids=["allowed", "not allowed"])
@pytest.mark.parametrize("returns", ["gradients", "activations"])
@pytest.mark.parametrize("name", ["WritesWeight", "WritesWeightByOp"])
def test_a_write_to_a_captured_parameter_reaches_it(
    name: str, returns: str, is_allowed: bool, remote: Loopback
) -> None:
    function = getattr(function_writes, name)
    ours = checkpointing(remote if is_allowed else Loopback(), returns=returns)
    same_bits(steps(function, ours, captures=True), steps(function, plainly, captures=True))


@pytest.mark.parametrize("returns", ["gradients", "activations"])
def test_memory_of_the_inside_may_be_overwritten(returns: str, remote: Loopback) -> None:
    """Nobody sees the write, so such a function runs on the worker."""
    function = function_writes.WritesInput
    same_bits(steps(function, checkpointing(remote, returns=returns)), steps(function, plainly))
    assert {decision for segment in remote.report().segments for decision in segment.decisions} == {
        Decision.GRADIENTS if returns == "gradients" else Decision.ACTIVATIONS
    }


def test_memory_of_the_inside_that_someone_keeps(remote: Loopback) -> None:
    """An alias that no graph shows. The write is noticed, as the worker then returns activations."""

    def kept(checkpoint: Checkpoint) -> list[Any]:
        torch.manual_seed(0)
        x, w = torch.randn(4, WIDTH, requires_grad=True), torch.randn(WIDTH, requires_grad=True)
        inside: list[Tensor] = []

        def body(x: Tensor) -> Tensor:
            h = x.sin()
            inside.append(h.detach())
            product: Tensor = function_writes.WritesInput.apply(h, w)
            return product.cos()

        checkpoint(body, x).sum().backward()
        return [x.grad, w.grad, *inside]

    with pytest.raises(ReplayError, match="has written to a tensor that outlives the forward"):
        kept(checkpointing(remote))
    same_bits(kept(checkpointing(remote)), kept(plainly))


@pytest.mark.parametrize("returns", ["gradients", "activations"])
@pytest.mark.parametrize(
    ("name", "way"),
    [pytest.param("ByNumPy", "numpy", marks=BY_NUMPY), ("ByData", "data")],
)
def test_a_backward_that_names_a_way_to_write_unseen_stays_on_the_trainer(
    name: str, way: str, returns: str, remote: Loopback
) -> None:
    function = getattr(function_writes, name)

    def twice(checkpoint: Checkpoint) -> list[Any]:
        torch.manual_seed(0)
        x, w = torch.randn(4, WIDTH, requires_grad=True), torch.randn(WIDTH, requires_grad=True)
        loss = checkpoint(lambda x, w: function.apply(x.sin(), w).cos(), x, w).sum()
        first = torch.autograd.grad(loss, [x, w], retain_graph=True)
        return [*first, w.detach().clone(), *torch.autograd.grad(loss, [x, w]), w.detach().clone()]

    same_bits(twice(checkpointing(remote, returns=returns)), twice(plainly))
    (segment,) = remote.report().segments
    assert [f"may write by {way}" in reason for reason in segment.kept] == [True]


def gradients(checkpoint: Checkpoint, body: Any, times: int) -> list[Tensor]:
    """Returns the gradients of backward calls over one graph."""
    torch.manual_seed(0)
    x, w = torch.randn(4, WIDTH, requires_grad=True), torch.randn(WIDTH, requires_grad=True)
    loss = checkpoint(body, x, w).sum()
    return [g for _ in range(times) for g in torch.autograd.grad(loss, [x, w], retain_graph=True)]


@pytest.mark.parametrize("returns", ["gradients", "activations"])
def test_a_second_backward_starts_from_the_values_of_forward(returns: str, remote: Loopback) -> None:
    """What a kernel has written to a saved tensor of the function itself is not noticed."""
    body = lambda x, w: function_writes.ScalesSaved.apply(x.sin(), w).cos()  # noqa: E731
    first, plain = gradients(plainly, body, 1), gradients(plainly, body, 2)
    assert not torch.equal(plain[0], plain[2])
    same_bits(gradients(checkpointing(remote, returns=returns), body, 2), first * 2)


@pytest.mark.parametrize(
    ("body", "read_only"),
    [
        (lambda x, w: function_writes.WritesAttribute.apply(x.exp(), w).cos(), lambda x, w: (x.exp() * w).cos()),
        pytest.param(
            lambda x, w: function_writes.ByNumPy.apply(x.sin() * w, w).cos(),
            lambda x, w: (x.sin() * w * w).cos(),
            marks=BY_NUMPY,
        ),
    ],
    ids=["keeps an attribute", "stays on the trainer"],
)
def test_an_op_before_the_function_starts_from_the_values_of_forward(
    body: Any, read_only: Any, remote: Loopback
) -> None:
    """What the op has saved is recomputed, and the function has the trainer's own tensor."""
    ours = gradients(checkpointing(remote, returns="activations"), body, 1)
    assert not torch.equal(gradients(plainly, body, 1)[0], ours[0])
    same_bits(ours[:1], gradients(plainly, read_only, 1)[:1])


def accumulated(function: Any, checkpoint: Checkpoint, *, is_leaf: bool) -> list[Tensor | None]:
    torch.manual_seed(0)
    x, w = torch.randn(4, WIDTH, requires_grad=True), torch.randn(2 * WIDTH, requires_grad=True)
    leaf = torch.randn(WIDTH, requires_grad=True)
    body = lambda h, w: function.apply(h.sin(), w).cos()  # noqa: E731
    checkpoint(body, x.cos(), leaf if is_leaf else w[:WIDTH]).sum().backward()
    return [x.grad, w.grad, leaf.grad]


@pytest.mark.parametrize("returns", ["gradients", "activations"])
@pytest.mark.parametrize("is_leaf", [True, False], ids=["leaf", "view"])
def test_a_backward_that_runs_another_stays_on_the_trainer(is_leaf: bool, returns: str, remote: Loopback) -> None:
    function, ours = function_writes.Accumulates, checkpointing(remote, returns=returns)
    same_bits(accumulated(function, ours, is_leaf=is_leaf), accumulated(function, plainly, is_leaf=is_leaf))
    (segment,) = remote.report().segments
    assert ["uses .grad of tensors" in reason for reason in segment.kept] == [True]


@pytest.mark.parametrize("is_leaf", [True, False], ids=["leaf", "view"])
def test_a_backward_that_runs_another_unnoticed_is_a_named_error(is_leaf: bool, remote: Loopback) -> None:
    function, ours = function_writes.AccumulatesUnnamed, checkpointing(remote, returns="gradients")
    with pytest.raises(ReplayError, match="has run a backward of its own that adds to .grad"):
        accumulated(function, ours, is_leaf=is_leaf)
    same_bits(accumulated(function, ours, is_leaf=is_leaf), accumulated(function, plainly, is_leaf=is_leaf))
