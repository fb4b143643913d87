"""Trainings by whole micro-batches, beside the loop that computes each of them on the trainer."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy as torchs_cross_entropy
from torch.nn.functional import dropout, silu

from backhaul import Session
from backhaul._accumulate.whole_shares import LEARNING
from support.bits import seed_generators

WIDTH, TOKENS = 16, 23
SHARE = 4
"""How many of the micro-batches of a block workers get where a test uses the fixture `whole_share`."""


class Layer(nn.Module):
    """A norm, two projections, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + dropout(self.down(silu(self.up(self.norm(x)))), 0.1, self.training)


class Language(nn.Module):
    """A small language model, whose head may be tied to its embedding, or which trains adapters only."""

    def __init__(self, *, is_tied: bool = True, is_adapted: bool = False) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS, bias=False)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        if is_tied:
            self.head.weight = self.embedding.weight
        if is_adapted:
            self.requires_grad_(False)
            for layer in self.layers:
                assert isinstance(layer, Layer)
                layer.up = Adapted(layer.up)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


class Adapted(nn.Linear):
    """A frozen projection with an adapter that is trained."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__(base.in_features, base.out_features)
        self.requires_grad_(False)
        self.first, self.second = (
            nn.Linear(base.in_features, 2, bias=False),
            nn.Linear(2, base.out_features, bias=False),
        )

    def forward(self, input: Tensor) -> Tensor:
        adapted: Tensor = super().forward(input) + self.second(self.first(input))
        return adapted


def batch(step: int, micro_batches: int, lengths: Sequence[int] = (5,)) -> list[tuple[Tensor, Tensor]]:
    """Tokens and targets of each micro-batch of a step, of these lengths in turn."""
    generator = torch.Generator().manual_seed(step)
    shapes = [(2, lengths[number % len(lengths)]) for number in range(micro_batches)]
    return [
        (torch.randint(TOKENS, shape, generator=generator), torch.randint(TOKENS, shape, generator=generator))
        for shape in shapes
    ]


def cross_entropy(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """The loss of a micro-batch."""
    return torchs_cross_entropy(model(tokens).flatten(0, 1), targets.flatten()) / 4


class Alone:
    """Stands for a block: runs each micro-batch at once, with its backward."""

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        loss = function(*args, **kwargs)
        loss.backward()
        return loss.detach()


@contextmanager
def alone() -> Iterator[Alone]:
    """Stands for `session.accumulate` without a session."""
    yield Alone()


def train(
    session: Session | None,
    build: Callable[[], nn.Module] = Language,
    loss: Callable[..., Tensor] = cross_entropy,
    *,
    steps: int = 3,
    micro_batches: int = 6,
    lengths: Sequence[int] = (5,),
    prepare: Callable[[nn.Module], object] = lambda model: None,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    clip: float = 0.0,
    happens: Callable[[int, int], None] = lambda step, number: None,
    device: str = "cpu",
) -> list[Tensor]:
    """Everything that must be equal, in all steps: losses, gradients, weights, buffers, and the generator's state.

    Args:
        session: Opens the blocks; None for the loop.
        build: Makes the model, seeded.
        loss: The loss of a micro-batch, from the model, its tokens and its targets.
        steps: How many.
        micro_batches: The number in each step.
        lengths: The lengths of the micro-batches, in turn.
        prepare: Called with the model before the first step.
        optimizer: Makes the optimizer from the parameters that take gradients and their learning rate.
        clip: The norm to which gradients are clipped; 0 for none.
        happens: Called with the number of the step and of the micro-batch, before the latter.
        device: Where the model and its inputs are.
    """
    seed_generators(0)
    model = build().to(device)
    prepare(model)
    stepper = optimizer([one for one in model.parameters() if one.requires_grad], lr=1e-2)
    results: list[Tensor] = []
    for step in range(steps):
        losses = []
        with alone() if session is None else session.accumulate() as block:
            for number, (tokens, targets) in enumerate(batch(step, micro_batches, lengths)):
                happens(step, number)
                losses.append(block.run(loss, model, tokens.to(device), targets.to(device)))
        assert all(type(one) is Tensor and not one.requires_grad for one in losses)
        if clip:
            results.append(nn.utils.clip_grad_norm_(model.parameters(), clip))
        results += [one.clone() for one in losses]
        results += [one.grad.clone() for one in model.parameters() if one.grad is not None]
        stepper.step()
        stepper.zero_grad()
        results += [one.detach().clone() for one in (*model.parameters(), *model.buffers())]
        results += [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if device == "cuda" else [])]
    return results


def whole_in(session: Session) -> int:
    """How many micro-batches workers have got whole."""
    return sum(segment.whole for segment in session.report().segments)


def reasons_in(session: Session) -> list[str]:
    """Why the trainer has computed others itself."""
    return [reason for segment in session.report().segments for reason in segment.not_whole]


def most_remote(steps: int, micro_batches: int, share: int) -> int:
    """How many micro-batches workers compute whole if they get so many of each step, and know no program before."""
    return share * steps - min(LEARNING, share * steps)
