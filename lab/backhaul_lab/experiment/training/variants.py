"""The variants of a training that take turns: without checkpointing, with torch's, and with Backhaul's."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from backhaul.demo.memory import peak_live_bytes
from backhaul_lab.experiment.training.models import ExperimentModel, load

if TYPE_CHECKING:
    from backhaul._session import Session

NONE, TORCH, BACKHAUL = "none", "torch", "backhaul"
VARIANTS = (NONE, TORCH, BACKHAUL)
"""Names of the variants: without checkpointing, `torch.utils.checkpoint`, and Backhaul."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_DRAWS = 1_000_003  # apart from the seeds of other experiments


class ExperimentVariant:
    """One variant, with a model and an optimizer of its own. Variants with the same seed compute the same.

    Args:
        name: Name of the variant, one of `VARIANTS`.
        model: Settings of the model, see `ModelSpec`.
        cell: The cell's values by axis.
        seed: Seed of weights, data and dropout.
        session: The session of Backhaul's variant, None for the others.
    """

    def __init__(
        self,
        name: str,
        model: Mapping[str, Any],
        cell: Mapping[str, Any],
        seed: int,
        session: "Session | None" = None,
    ) -> None:
        self.name, self.session = name, session
        self._seed, self._rows, self._micro_batches = seed, cell["batch"], cell["micro_batches"]
        self.model: ExperimentModel = load(model, cell["batch"], DTYPES[cell["dtype"]], seed)
        layers, size = list(self.model.layers), cell["segment_layers"]
        self.segments: list[nn.Module] = [
            layers[i] if size == 1 else nn.Sequential(*layers[i : i + size]) for i in range(0, len(layers), size)
        ]
        self.parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-4)
        self._checkpoint: Callable[..., Tensor] | None = {
            NONE: None,
            TORCH: partial(torch_checkpoint, use_reentrant=False),
            BACKHAUL: session.checkpoint if session is not None else None,
        }[name]
        self._steps = 0
        self._happens: Callable[[], None] = lambda: None

    def turn(
        self, steps: int, eventful: Collection[int] = (), happens: Callable[[], None] = lambda: None
    ) -> dict[str, list[float]]:
        """Runs and times some steps. The gradients of the last one stay until the next turn.

        Args:
            steps: Number of steps to run.
            eventful: Numbers of the steps in whose middle `happens` is called.
            happens: Called after the forward of half of the micro-batches.

        Returns:
            The durations in seconds and the losses.
        """
        durations_s, losses = [], []
        for number in range(steps):
            self._happens = happens if number in eventful else lambda: None
            began_s = perf_counter()
            losses.append(self.step())
            durations_s.append(perf_counter() - began_s)
        return {"step_s": durations_s, "losses": losses}

    def step(self) -> float:
        """Runs one step of training. Returns the loss."""
        self.optimizer.zero_grad()
        loss = self.forward_backward()
        self.optimizer.step()
        if self.session is not None:
            self.session.step(loss)
        return loss

    def forward_backward(self) -> float:
        """Runs the micro-batches of a step without the optimizer. Returns the loss."""
        self._steps += 1
        total = 0.0
        with self._backwards() as backward:
            for number in range(self._micro_batches):
                seed = self._seed + _DRAWS * self._steps + number
                loss = self.forward(self._rows // self._micro_batches, seed) / self._micro_batches
                if number == self._micro_batches // 2:
                    self._happens()
                backward(loss)
                total += loss.item()
        return total

    def forward(self, rows: int, seed: int) -> Tensor:
        """Runs forward of some rows. Returns the loss, a scalar."""
        torch.manual_seed(seed)  # All variants draw the same dropout.
        x, target = self.model.begin(rows, seed)
        for segment in self.segments:
            x = segment(x) if self._checkpoint is None else self._checkpoint(segment, x)
        return self.model.loss(x, target)

    @contextmanager
    def _backwards(self) -> Iterator[Callable[[Tensor], None]]:
        """Yields the function that runs the backward of a micro-batch's loss."""
        if self.session is None or self._micro_batches == 1:
            yield Tensor.backward
        else:
            with self.session.accumulate() as block:
                yield block.backward

    def peak_bytes(self) -> int:
        """Returns the peak memory of activations and gradients in one more step, which updates no weight."""
        self.optimizer.zero_grad()
        return peak_live_bytes(self.forward_backward)


def unequal(variants: Sequence[ExperimentVariant]) -> dict[str, list[int]]:
    """Compares gradients and weights with those of the first variant bit by bit.

    So a NaN that all variants compute is equal, as in a training that diverges, and 0 is not equal to -0. Weights are
    compared because they hold the gradients of all earlier steps.

    Returns:
        For each variant that differs: how many gradients and how many weights do.
    """
    first, *others = variants
    differences = {}
    for other in others:
        pairs = list(zip(other.parameters, first.parameters, strict=True))
        gradients = sum(not _equal(ours.grad, theirs.grad) for ours, theirs in pairs)
        weights = sum(not _equal(ours, theirs) for ours, theirs in pairs)
        if gradients or weights:
            differences[other.name] = [gradients, weights]
    return differences


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    ours, theirs = (tensor.detach().contiguous().flatten().view(torch.uint8) for tensor in (one, other))
    return torch.equal(ours, theirs)
