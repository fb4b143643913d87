"""Contributions to an input's gradient that the worker adds up: the sums have the bits of autograd's sums."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from backhaul import Session
from backhaul._worker_client.remote_segment import SavedSegment
from support.bits import Checkpoint, differing, plainly, train

BLOCKS = 3
Run = Callable[[Checkpoint, nn.Module], tuple[Tensor, list[Tensor]]]


class Thrice(nn.Module):
    """A block with three contributions of very different size to one gradient, whose sum depends on their order."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return 1e3 * x.sin() + 1e-2 * self.linear(x) * x.sigmoid()


def build() -> nn.ModuleList:
    return nn.ModuleList(Thrice() for _ in range(BLOCKS))


def straight(checkpoint: Checkpoint, model: nn.Module) -> tuple[Tensor, list[Tensor]]:
    x = y = torch.randn(16, 32, requires_grad=True)
    for block in model:  # type: ignore[attr-defined]
        y = checkpoint(block, y)
    return y.square().mean(), [x]


def used_later(checkpoint: Checkpoint, model: nn.Module) -> tuple[Tensor, list[Tensor]]:
    x = y = torch.randn(16, 32, requires_grad=True)
    for block in model:  # type: ignore[attr-defined]
        y = y / 3 + checkpoint(block, y) + 7e-3 * y
    return y.square().mean(), [x]


def used_before(checkpoint: Checkpoint, model: nn.Module) -> tuple[Tensor, list[Tensor]]:
    x = y = torch.randn(16, 32, requires_grad=True)
    loss = torch.zeros(())
    for block in model:  # type: ignore[attr-defined]
        loss = loss + (y + 3e-3).sum() / 7
        y = checkpoint(block, y)
    return y.square().mean() + loss, [x]


def saved_before(checkpoint: Checkpoint, model: nn.Module) -> tuple[Tensor, list[Tensor]]:
    """An earlier op has saved the input, so the trainer cannot tell whether the input has further uses."""
    x = y = torch.randn(16, 32, requires_grad=True)
    loss = torch.zeros(())
    for block in model:  # type: ignore[attr-defined]
        loss = loss + y.square().mean()
        y = checkpoint(block, y)
    return y.square().mean() + loss, [x]


def all_kept(checkpoint: Checkpoint, model: nn.Module) -> tuple[Tensor, list[Tensor]]:
    x = y = torch.randn(16, 32, requires_grad=True)
    kept = []
    for block in model:  # type: ignore[attr-defined]
        kept.append(y)
        y = checkpoint(block, y)
    return y.square().mean() + sum((h * 1e-3).exp().mean() for h in kept), [x]


def twice(checkpoint: Checkpoint, model: nn.Module) -> tuple[Tensor, list[Tensor]]:
    x = y = torch.randn(16, 32, requires_grad=True)
    first, *others = model.children()
    y = checkpoint(first, y)
    for block in others:
        y = checkpoint(block, y) + checkpoint(block, y) * 1e-3
    return y.square().mean(), [x]


def by_a_view(checkpoint: Checkpoint, model: nn.Module) -> tuple[Tensor, list[Tensor]]:
    """A view of the input is alive, and is used later."""
    x = y = torch.randn(16, 32, requires_grad=True)
    loss = torch.zeros(())
    for block in model:  # type: ignore[attr-defined]
        view = y.view(32, 16)
        y = checkpoint(block, y)
        loss = loss + (view * 3e-3).cos().mean()
    return y.square().mean() + loss, [x]


@pytest.mark.parametrize(
    ("run", "summed"),
    [(straight, 2), (used_later, 0), (used_before, 2), (saved_before, 0), (all_kept, 0), (twice, 0), (by_a_view, 0)],
)
def test_sums_are_those_of_autograd(session: Session, monkeypatch: pytest.MonkeyPatch, run: Run, summed: int) -> None:
    additions: list[int] = []
    backward = SavedSegment.backward

    def noting(
        self: SavedSegment, gradients: object, state: object, summed: set[int], *rest: object, **options: object
    ) -> object:
        additions.append(len(summed))
        return backward(self, gradients, state, summed, *rest, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(SavedSegment, "backward", noting)
    ours = train(lambda f, *a: session.checkpoint(f, *a, returns="gradients"), build, run, steps=3)
    assert differing(ours, train(plainly, build, run, steps=3)) == []
    assert session.report().fallbacks == 0
    assert sum(additions) == 3 * summed
