"""Compiled segments that write to memory: their own, statistics of layers, or what they are passed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backhaul._forward import captured_graph
from backhaul._forward.captured_graph import OTHER_OPS
from backhaul_runtime.record.known_program import SHARED_WRITE
from support.bits import Checkpoint, differing, plainly, seed_generators
from support.compiled import MARKS, WAYS, WIDTH, own
from support.devices import DEVICE
from support.loopback import Loopback

pytestmark = MARKS
CALLS = 6


class Statistics(nn.Module):
    """Layers that write to their buffers, in each way that torch has."""

    mean: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.linear(x)).relu_()
        y = y - self.mean * self.count
        with torch.no_grad():
            self.mean.lerp_(y.detach().mean(0), 0.1)
            self.count.add_(1)
        return nn.functional.dropout(y, 0.2, self.training) * self.mean


def in_place(x: Tensor) -> Tensor:
    y = x.sin().mul_(2)
    y[:, 0].add_(1)
    z = torch.zeros_like(y).scatter_(1, torch.ones_like(y, dtype=torch.int64), y)
    return nn.functional.relu(z + y, inplace=True)


def results(checkpoint: Checkpoint, function: Any, *others: Tensor) -> list[Tensor | None]:
    """Outputs and gradients of some calls, and what they have written."""
    values = list[Tensor | None]()
    for number in range(CALLS):
        seed_generators(number)
        x = torch.randn(4, WIDTH, device=DEVICE, requires_grad=True)
        y = checkpoint(function, x * 1, *others)
        y.square().sum().backward()
        values += [y.detach(), x.grad, *[other.clone() for other in others]]
        if isinstance(function, nn.Module):
            values += [parameter.grad for parameter in function.parameters()]
            values += [buffer.clone() for buffer in function.buffers()]
            function.zero_grad()
    return [*values, torch.get_rng_state()]


def statistics() -> Statistics:
    torch.manual_seed(0)
    return Statistics().to(DEVICE)


def is_known(remote: Loopback) -> bool:
    (segment,) = remote.report().segments
    assert not segment.reasons
    assert not segment.kept
    return segment.known >= CALLS - 3


@WAYS
@pytest.mark.parametrize("make", [statistics, lambda: in_place])
def test_what_a_known_program_writes_has_eagers_bits(
    make: Callable[[], Any], way: Callable[[Loopback], Checkpoint]
) -> None:
    remote = Loopback()
    assert not differing(results(plainly, make()), results(way(remote), make()))
    assert is_known(remote)
    assert not remote.report().segments[0].recorded


def test_an_argument_that_is_written_to_has_the_value_of_forward_in_backward() -> None:
    def accumulating(x: Tensor, state: Tensor) -> Tensor:
        before = state.clone()
        state.add_(x.detach())
        return (x * state).tanh() * before

    remote = Loopback()
    expected = results(plainly, accumulating, torch.zeros(4, WIDTH, device=DEVICE))
    assert not differing(expected, results(own(remote), accumulating, torch.zeros(4, WIDTH, device=DEVICE)))
    assert is_known(remote)


def test_statistics_may_change_before_backward_and_a_worker_may_be_lost() -> None:
    remote = Loopback()
    torch.manual_seed(0)
    block, reference = (
        nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh()).to(DEVICE) for _ in "ab"
    )
    reference.load_state_dict(block.state_dict())
    assert not differing(results(plainly, reference), results(own(remote), block))
    gradients = []
    for checkpoint, one in ((plainly, reference), (own(remote), block)):
        torch.manual_seed(7)
        x = torch.randn(4, WIDTH, device=DEVICE, requires_grad=True)
        y = checkpoint(one, x * 1)
        loss = checkpoint(one, y).square().sum()  # writes once more
        remote.is_lost = True
        loss.backward()
        gradients.append([x.grad, *(parameter.grad for parameter in one.parameters()), *one.buffers()])
    assert not differing(*gradients)


def test_a_write_to_what_autograd_has_saved_fails_as_without_checkpointing() -> None:
    remote = Loopback()
    for _ in range(CALLS):
        x = torch.randn(4, WIDTH, device=DEVICE, requires_grad=True)
        y = own(remote)(lambda x: x.exp().mul_(2), x, returns="gradients")
        expected = x.detach().exp().mul_(2)
        assert torch.equal(y, expected)
    (segment,) = remote.report().segments
    assert list(segment.recorded) == ["it writes to memory that autograd has saved before"]


def test_an_input_that_shares_memory_with_a_written_one_is_recorded() -> None:
    def function(x: Tensor, state: Tensor, other: Tensor) -> Tensor:
        state.add_(1)
        return (x * other).tanh()

    remote, memory, elsewhere = Loopback(), torch.zeros(2, WIDTH, device=DEVICE), torch.zeros(2, WIDTH, device=DEVICE)
    for number in range(CALLS + 2):
        x = torch.randn(4, WIDTH, device=DEVICE, requires_grad=True)
        other = (memory if number == CALLS else elsewhere)[1]
        gradients = []
        for checkpoint in (plainly, own(remote)):
            memory.zero_()
            (gradient,) = torch.autograd.grad(checkpoint(function, x, memory[0], other).sum(), x)
            gradients.append(gradient)
        assert torch.equal(*gradients)
    (segment,) = remote.report().segments
    assert segment.recorded == {SHARED_WRITE: 1}
    assert segment.known == CALLS + 1 - 3


def test_a_graph_that_runs_other_ops_leaves_no_write_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured_graph, "_is_same", lambda segment, expected: False)
    remote = Loopback()
    assert not differing(results(plainly, statistics()), results(own(remote), statistics()))
    (segment,) = remote.report().segments
    assert list(segment.recorded) == [OTHER_OPS]


def test_a_parameter_that_is_written_to_is_recorded() -> None:
    block = nn.Linear(WIDTH, WIDTH).to(DEVICE)

    def clipped(x: Tensor) -> Tensor:
        with torch.no_grad():
            block.weight.clamp_(-0.1, 0.1)
        return block(x).tanh()

    remote = Loopback()
    assert not differing(results(plainly, clipped), results(own(remote), clipped))
    (segment,) = remote.report().segments
    assert list(segment.recorded) == ["it writes to an input that takes gradients"]


def test_a_due_call_runs_the_function_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured_graph, "CHECKED_CALLS", 2)
    remote = Loopback()
    assert not differing(results(plainly, statistics()), results(own(remote), statistics()))
    assert 0 < remote.report().segments[0].known < CALLS - 3
