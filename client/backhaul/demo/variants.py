"""The four ways to train, and one step of each."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  torch's own name for it
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from backhaul._session import Session
from backhaul.demo.corpus import batch
from backhaul.demo.memory import peak_live_bytes
from backhaul.demo.model import Checkpoint, LanguageModel


@dataclass(frozen=True, slots=True)
class Settings:
    """What the demo trains."""

    steps: int = 8
    """Training steps of each variant."""

    layers: int = 6
    """Blocks, each one segment."""

    width: int = 256
    """Width of the model, a multiple of 32."""

    context: int = 256
    """Bytes of text per row."""

    batch: int = 4
    """Rows per step."""

    seed: int = 0
    """Of weights, batches and dropout."""


@dataclass
class Variant:
    """One way to train, with a model and an optimizer of its own.

    Attributes:
        name: For the table.
        checkpoint: Runs each block, None: plainly.
        session: Of a Backhaul variant.
    """

    name: str
    checkpoint: Checkpoint | None
    settings: Settings
    session: Session | None = None
    losses: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    losses_equal: bool = True
    gradients_equal: bool = True
    peak_bytes: int = 0

    def __post_init__(self) -> None:
        torch.manual_seed(self.settings.seed)
        self.model = LanguageModel(self.settings.layers, self.settings.width, self.settings.context)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def backward(self, corpus: Tensor, step: int) -> float:
        """Forward and backward of a step. Returns the loss; gradients stand in the parameters."""
        settings = self.settings
        text, target = batch(corpus, settings.batch, settings.context, settings.seed + step)
        torch.manual_seed(settings.seed + step)  # the same dropout in every variant
        logits = self.model(text, self.checkpoint)
        loss = F.cross_entropy(logits.flatten(0, 1), target.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    def train(self, corpus: Tensor, step: int) -> None:
        """A timed step up to its gradients and the optimizer's change of the weights, which `finish` makes."""
        started = perf_counter()
        self.losses.append(self.backward(corpus, step))
        if self.session is not None:
            self.session.step(self.losses[-1])
        self.step_s.append(perf_counter() - started)

    def finish(self) -> None:
        """The optimizer's part of the step, timed with it."""
        started = perf_counter()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step_s[-1] += perf_counter() - started

    def compare(self, reference: "Variant") -> None:
        """Compares the present loss and every gradient with those of another variant, bit by bit."""
        self.losses_equal &= self.losses[-1] == reference.losses[-1]
        for ours, theirs in zip(self.model.parameters(), reference.model.parameters(), strict=True):
            assert ours.grad is not None
            assert theirs.grad is not None
            self.gradients_equal &= torch.equal(ours.grad, theirs.grad)

    def measure_memory(self, corpus: Tensor) -> None:
        """One more step that is not timed and changes nothing, for its peak of activation memory."""
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)  # so that gradients are not counted as activations
        self.peak_bytes = peak_live_bytes(partial(self.backward, corpus, self.settings.steps))
        self.optimizer.zero_grad()


def variants(settings: Settings, connect: Callable[[str], Session]) -> list[Variant]:
    """All four, no checkpointing first.

    Args:
        settings: Of each.
        connect: Opens a session whose segments return the given kind.
    """
    found = [
        Variant("no checkpointing", None, settings),
        Variant("torch checkpoint", partial(torch_checkpoint, use_reentrant=False), settings),
    ]
    for returns in ("activations", "gradients"):
        session = connect(returns)
        found.append(Variant(f"backhaul {returns}", session.checkpoint, settings, session))
    return found
