"""The five variants of training that the demo compares."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  torch's own name for it
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from backhaul._session import Session
from backhaul.demo.corpus import batch
from backhaul.demo.model import Checkpoint, LanguageModel
from backhaul.demo.peak_memory import peak_live_bytes


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """Size of the model and length of the training."""

    steps: int = 8
    """Training steps of each variant."""

    layers: int = 6
    """Number of blocks. Each block is one segment."""

    width: int = 256
    """Width of the model, a multiple of 32."""

    context: int = 256
    """Number of bytes of text per row."""

    batch: int = 8
    """Number of rows per step."""

    micro_batches: int = 4
    """Number of micro-batches into which the rows of a step are divided, at most one per row."""

    device: str = "cpu"
    """Device of the models and of what they read."""

    seed: int = 0
    """Seed for weights, batches and dropout."""


@dataclass
class Variant:
    """One variant of training, with a model and an optimizer of its own.

    Attributes:
        name: Name of the variant in the table.
        checkpoint: Function that runs each block. None: without checkpointing.
        settings: Size of the model and length of the training.
        session: Session of a Backhaul variant. None for the other variants.
        is_deferred: Whether the micro-batches of a step run in an accumulation block.
        losses: Loss of each step so far.
        step_s: Duration of each step so far, in seconds.
        losses_equal: Whether all losses were bitwise equal to the reference's.
        gradients_equal: Whether all gradients were bitwise equal to the reference's.
        peak_bytes: Peak memory of a step's activations and gradients in bytes, 0 until `measure_memory` has run.
    """

    name: str
    checkpoint: Checkpoint | None
    settings: DemoSettings
    session: Session | None = None
    is_deferred: bool = False
    losses: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    losses_equal: bool = True
    gradients_equal: bool = True
    peak_bytes: int = 0

    def __post_init__(self) -> None:
        torch.manual_seed(self.settings.seed)
        model = LanguageModel(self.settings.layers, self.settings.width, self.settings.context)
        self.model = model.to(self.settings.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def backward(self, corpus: Tensor, step: int) -> float:
        """Runs forward and backward of a step. Returns the loss and leaves the gradients in the parameters."""
        settings = self.settings
        rows = batch(corpus, settings.batch, settings.context, settings.seed + step)
        text, target = (part.to(settings.device) for part in rows)
        torch.manual_seed(settings.seed + step)  # Every variant draws the same dropout.
        micro_batches = list(zip(text.chunk(settings.micro_batches), target.chunk(settings.micro_batches), strict=True))
        total = 0.0
        with self._backwards() as backward:
            for inputs, targets in micro_batches:
                logits = self.model(inputs, self.checkpoint)
                loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten()) / len(micro_batches)
                backward(loss)
                total += loss.item()
        return total

    @contextmanager
    def _backwards(self) -> Iterator[Callable[[Tensor], None]]:
        """Yields the function that runs the backward of a micro-batch's loss."""
        if self.session is None or not self.is_deferred:
            yield Tensor.backward
        else:
            with self.session.accumulate() as block:
                yield block.backward

    def train(self, corpus: Tensor, step: int) -> None:
        """Runs and times a step without the optimizer's update, which `finish` does once gradients are compared."""
        started = perf_counter()
        self.losses.append(self.backward(corpus, step))
        if self.session is not None:
            self.session.step(self.losses[-1])
        self.step_s.append(perf_counter() - started)

    def finish(self) -> None:
        """Runs the optimizer and adds its time to the step's."""
        started = perf_counter()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step_s[-1] += perf_counter() - started

    def compare(self, reference: "Variant") -> None:
        """Compares the last loss and every gradient bitwise with those of another variant."""
        self.losses_equal &= self.losses[-1] == reference.losses[-1]
        for ours, theirs in zip(self.model.parameters(), reference.model.parameters(), strict=True):
            assert ours.grad is not None
            assert theirs.grad is not None
            self.gradients_equal &= torch.equal(ours.grad, theirs.grad)

    def measure_memory(self, corpus: Tensor) -> None:
        """Measures the peak memory in one more step, which is not timed and updates no weights."""
        self.peak_bytes = peak_live_bytes(partial(self.backward, corpus, self.settings.steps))
        self.optimizer.zero_grad()


def variants(settings: DemoSettings, connect: Callable[[str, str], Session]) -> list[Variant]:
    """Returns all five variants. The first one trains without checkpointing and is the reference.

    Args:
        settings: Settings that all variants share.
        connect: Function that opens a session, given a short name of the variant, which no other variant has, and the
            value for `returns`: "activations" or "gradients".
    """
    activations = connect("activations", "activations")
    gradients = connect("gradients", "gradients")
    deferred = connect("deferred", "gradients")
    return [
        Variant("no checkpointing", None, settings),
        Variant("torch checkpoint", partial(torch_checkpoint, use_reentrant=False), settings),
        Variant("backhaul activations", activations.checkpoint, settings, activations),
        Variant("backhaul gradients", gradients.checkpoint, settings, gradients),
        Variant("backhaul deferred", deferred.checkpoint, settings, deferred, is_deferred=True),
    ]
