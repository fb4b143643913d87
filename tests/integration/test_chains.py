"""Chains of segments whose backwards the worker runs speculatively: gradients are those of requested backwards."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from backhaul import Session
from backhaul_proto.v1 import telemetry_pb2
from conftest import settle
from support.bits import Checkpoint, differing, plainly, train
from support.processes import WorkerProcess

BLOCKS = 4


def build() -> nn.ModuleList:
    return nn.ModuleList(
        nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 16))
        for _ in range(BLOCKS)
    )


def inputs() -> Tensor:
    return torch.randn(8, 16, requires_grad=True)


def straight(checkpoint: Checkpoint, model: nn.Module) -> tuple[Tensor, list[Tensor]]:
    x = hidden = inputs()
    for block in model:  # type: ignore[attr-defined]
        hidden = checkpoint(block, hidden)
    return hidden.square().mean(), [x]


def residual(checkpoint: Checkpoint, model: nn.Module) -> tuple[Tensor, list[Tensor]]:
    x = hidden = inputs()
    for block in model:  # type: ignore[attr-defined]
        hidden = hidden + checkpoint(block, hidden)
    return hidden.square().mean(), [x]


def with_losses(checkpoint: Checkpoint, model: nn.Module) -> tuple[Tensor, list[Tensor]]:
    x = hidden = inputs()
    loss = torch.zeros(())
    for block in model:  # type: ignore[attr-defined]
        hidden = checkpoint(block, hidden)
        loss = loss + hidden.square().mean()
    return loss, [x]


def with_hooks(checkpoint: Checkpoint, model: nn.Module) -> tuple[Tensor, list[Tensor]]:
    x = hidden = inputs()
    for block in model:  # type: ignore[attr-defined]
        hidden = checkpoint(block, hidden)
        hidden.register_hook(lambda gradient: gradient * 0.5)
    return hidden.square().mean(), [x]


def used_twice(checkpoint: Checkpoint, model: nn.Module) -> tuple[Tensor, list[Tensor]]:
    """Each output is used by the next block three times."""
    x = hidden = inputs()
    for block in model:  # type: ignore[attr-defined]
        hidden = checkpoint(lambda x, block=block: x * 0.5 + block(x) * x.sigmoid(), hidden)
    return hidden.square().mean(), [x]


def calls(telemetry: telemetry_pb2.GetTelemetryResponse) -> int:
    return sum(rpc.calls for rpc in telemetry.rpcs if rpc.method == "Backward")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "speculated_each_step"),
    [(straight, BLOCKS - 1), (used_twice, BLOCKS - 1), (residual, 0), (with_losses, 0), (with_hooks, 0)],
)
def test_gradients_are_those_of_training_without_it(
    session: Session, worker: WorkerProcess, run: Callable[..., tuple[Tensor, list[Tensor]]], speculated_each_step: int
) -> None:
    def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    before = worker.telemetry()
    ours = train(lambda f, *a: session.checkpoint(f, *a, returns="gradients"), build, run, steps=4, optimizer=optimizer)
    assert differing(ours, train(plainly, build, run, steps=4, optimizer=optimizer)) == []
    settle(session)
    after = worker.telemetry()
    assert session.report().fallbacks == 0
    speculated = after.speculation_hits - before.speculation_hits
    # A request that arrives before its speculative backward is run instead: how many are depends on timing.
    assert speculated <= 4 * speculated_each_step
    assert (speculated > 0) == (speculated_each_step > 0)
    asked = calls(after) - calls(before)
    assert asked >= 4 * (BLOCKS - speculated_each_step)  # pushed results are not requested
    assert (asked < 4 * BLOCKS) == (speculated_each_step > 0)
    # Speculation that never matches its request is tried twice, and then no longer.
    most = 0 if speculated_each_step else 2 * BLOCKS
    assert after.speculation_misses - before.speculation_misses <= most


def test_a_second_backward_through_a_chain(session: Session) -> None:
    x = inputs()
    blocks = build()

    def gradients(checkpoint: Checkpoint) -> list[Tensor]:
        torch.manual_seed(3)
        hidden = x
        for block in blocks:
            hidden = checkpoint(block, hidden)
        loss = hidden.square().mean()
        wanted = [x, *blocks.parameters()]
        return [
            *torch.autograd.grad(loss, wanted, retain_graph=True),
            *torch.autograd.grad(2 * loss, wanted),
        ]

    ours = gradients(lambda f, *a: session.checkpoint(f, *a, returns="gradients"))
    assert differing(ours, gradients(plainly)) == []
    assert session.report().fallbacks == 0


def test_programs_that_change_each_step_leave_nothing_behind(session: Session) -> None:
    class Annealed(nn.Module):
        scale = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x) * self.scale

    blocks = [Annealed() for _ in range(BLOCKS)]
    for step in range(6):
        x = inputs()
        for block in blocks:
            block.scale = 1 - step / 10
            x = session.checkpoint(block, x, returns="gradients")
        x.sum().backward()
    counted = [session._dispatcher._sites.of(block, 0).speculation._misses for block in blocks]
    assert [len(misses) for misses in counted] == [0, *[1] * (BLOCKS - 1)]
    assert session.report().remote == 6 * BLOCKS
