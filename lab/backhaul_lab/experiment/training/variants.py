"""The variants of a training that take turns: without checkpointing, with torch's, and with Backhaul's."""

from collections.abc import Callable, Collection, Mapping, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from backhaul.demo.peak_memory import peak_live_bytes
from backhaul_lab.experiment.plan.spec import TORCH
from backhaul_lab.experiment.training.models import load
from backhaul_lab.harness.training import Training, checkpoint_of_torch, differing

if TYPE_CHECKING:
    from backhaul._session import Session

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class ExperimentVariant(Training):
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
        of_torch = checkpoint_of_torch if name == TORCH else None
        super().__init__(
            name,
            load(model, cell["batch"], DTYPES[cell["dtype"]], seed),
            of_torch if session is None else session.checkpoint,
            segment_layers=cell["segment_layers"],
            rows=cell["batch"],
            micro_batches=cell["micro_batches"],
            accumulate=session.accumulate if session is not None and cell["micro_batches"] > 1 else None,
            seed=seed,
        )
        self.session = session
        self._loss = 0.0

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

        def happen(number: int) -> None:
            if number == self._micro_batches // 2:
                happens()

        durations_s, losses = [], []
        for number in range(steps):
            self.happens = happen if number in eventful else lambda _: None
            began_s = perf_counter()
            self.step()
            losses.append(self._loss)
            durations_s.append(perf_counter() - began_s)
        return {"step_s": durations_s, "losses": losses}

    def step(self) -> None:
        """Runs one step of training, and ends the session's step."""
        super().step()
        self._loss = sum(loss.item() for loss in self.losses)
        if self.session is not None:
            self.session.step(self._loss)

    def peak_bytes(self) -> int:
        """Returns the peak memory of activations and gradients in one more step, which updates no weight."""
        self.clear_gradients()
        return peak_live_bytes(self.forward_backward)


def unequal(variants: Sequence[ExperimentVariant]) -> dict[str, list[int]]:
    """Compares gradients and weights with those of the first variant bit by bit.

    Weights are compared because they hold the gradients of all earlier steps.

    Returns:
        For each variant that differs: how many gradients and how many weights do.
    """
    first, *others = variants
    differences = {}
    for other in others:
        gradients = differing(other.gradients(), first.gradients())
        weights = differing(other.parameters, first.parameters)
        if gradients or weights:
            differences[other.name] = [gradients, weights]
    return differences
