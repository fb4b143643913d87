"""Replays on the trainer: values that went stale, graphs that must go, errors that must keep their names."""

import gc
import weakref
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor, nn

from backhaul import SavedTensorModifiedError, StaleTensorError
from backhaul._backward import local_recompute
from backhaul._backward.frame import Frame
from backhaul_runtime.errors import Refusal
from backhaul_runtime.replay.replay import Replay
from backhaul_runtime.replay.saved_tensors import SavedTensorPacker, VersionedTensor
from support.bits import grad_of
from support.loopback import Loopback


class Unreachable(Loopback):
    """No worker takes anything."""

    def save(self, *_: Any) -> NoReturn:
        raise Refusal("no worker in this test")


Block = nn.TransformerEncoderLayer
RETURNS = ["gradients", "activations"]


@pytest.fixture
def block() -> Block:
    return nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)


@pytest.mark.parametrize("returns", RETURNS)
def test_a_parameter_changed_after_forward_is_a_named_error(block: Block, returns: str) -> None:
    y = Unreachable().checkpoint(block, torch.randn(2, 4, 16, requires_grad=True), returns=returns)
    with torch.no_grad():
        block.linear1.weight.add_(1)
    with pytest.raises(StaleTensorError, match="before optimizer.step"):
        y.sum().backward()


@pytest.mark.parametrize("returns", RETURNS)
def test_a_parameter_changed_past_its_version_counter_is_a_named_error(block: Block, returns: str) -> None:
    y = Unreachable().checkpoint(block, torch.randn(2, 4, 16), returns=returns)
    block.linear1.weight.data.add_(1)
    with pytest.raises(StaleTensorError):
        y.sum().backward()


@pytest.mark.parametrize("returns", RETURNS)
@pytest.mark.parametrize("size", [4, 128])  # a replay remembers the digest of the larger weight
def test_a_parameter_that_another_thread_writes_to_during_a_replay(
    monkeypatch: pytest.MonkeyPatch, size: int, returns: str
) -> None:
    linear = nn.Linear(size, size)

    class Disturbed(Replay):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            with torch.no_grad():
                linear.weight.add_(1)
            super().__init__(*args, **kwargs)

    y = Unreachable().checkpoint(lambda x: linear(x.exp()), torch.randn(2, size, requires_grad=True), returns=returns)
    monkeypatch.setattr(local_recompute, "Replay", Disturbed)
    with pytest.raises(StaleTensorError, match="before optimizer.step"):
        y.sum().backward()


@pytest.mark.parametrize("returns", RETURNS)
def test_what_no_counter_sees_of_an_argument_does_not_matter(block: Block, returns: str) -> None:
    x = torch.randn(2, 4, 16)
    torch.manual_seed(1)
    block(x).sum().backward()
    expected = [grad_of(parameter) for parameter in block.parameters()]
    block.zero_grad()
    torch.manual_seed(1)
    y = Unreachable().checkpoint(block, x, returns=returns)
    x.data.zero_()
    y.sum().backward()
    assert all(torch.equal(grad_of(p), e) for p, e in zip(block.parameters(), expected, strict=True))


def test_a_second_backward_needs_retain_graph(block: Block) -> None:
    x = torch.randn(2, 4, 16, requires_grad=True)
    y = Unreachable().checkpoint(block, x, returns="gradients").sum()
    y.backward(retain_graph=True)
    first = grad_of(x).clone()
    y.backward()
    assert torch.equal(grad_of(x), first * 2)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.backward()


@pytest.mark.parametrize("returns", RETURNS)
@pytest.mark.parametrize("remote", [Loopback, Unreachable])
def test_writing_to_what_backward_needs_is_the_error_it_always_was(returns: str, remote: type[Loopback]) -> None:
    def fn(x: Tensor) -> Tensor:
        y = x.exp()
        y.add_(1)
        return y

    x = torch.randn(4, requires_grad=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        fn(x).sum().backward()
    with pytest.raises(SavedTensorModifiedError, match="modified by an inplace operation"):
        remote().checkpoint(fn, x, returns=returns, early_stop=False).sum().backward()


@pytest.mark.slow
@pytest.mark.parametrize("returns", RETURNS)
@pytest.mark.parametrize("remote", [Loopback, Unreachable])
def test_nothing_is_left_when_a_step_is_over(block: Block, returns: str, remote: type[Loopback]) -> None:
    left = (VersionedTensor, Replay, SavedTensorPacker)
    gc.collect()
    gc.freeze()  # what was there before is not among gc.get_objects(): tracebacks of earlier tests, and all of torch
    gc.disable()
    try:
        frames: list[weakref.ref[object]] = []
        x = torch.randn(2, 4, 16, requires_grad=True)
        for backward in (True, False):
            y = remote().checkpoint(block, x, returns=returns)
            frames += [weakref.ref(o) for o in gc.get_objects() if type(o) is Frame]
            if backward:
                y.sum().backward()
            del y
        assert [frame() for frame in frames] == [None] * len(frames)
        assert frames
        assert [o for o in gc.get_objects() if type(o) in left] == []
    finally:
        gc.enable()


def test_generators_and_settings_are_the_callers_again(block: Block) -> None:
    y = Unreachable().checkpoint(block, torch.randn(2, 4, 16, requires_grad=True))
    torch.manual_seed(7)
    state = torch.get_rng_state()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y.sum().backward()
        assert torch.is_autocast_enabled("cpu")
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("returns", RETURNS)
def test_a_weight_whose_memory_was_freed_is_named(returns: str) -> None:
    linear = torch.nn.Linear(4, 4)
    y = Unreachable().checkpoint(lambda x: linear(x).exp(), torch.randn(2, 4, requires_grad=True), returns=returns)
    linear.weight.untyped_storage().resize_(0)
    with pytest.raises(StaleTensorError, match="memory was freed.*Keep parameters allocated"):
        y.sum().backward()


def test_an_argument_whose_memory_was_freed_is_recomputed_from_its_copy() -> None:
    x = torch.randn(4, requires_grad=True)
    expected = x.detach().cos()
    y = Unreachable().checkpoint(torch.sin, x, debug=True)
    x.untyped_storage().resize_(0)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], expected)
