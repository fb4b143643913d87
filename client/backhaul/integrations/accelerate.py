"""Training loops with Accelerate. See docs/integrations/accelerate.md."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accelerate import Accelerator
from torch import nn

from backhaul._session import Session
from backhaul.integrations._accelerator import defer_backward, is_sharded
from backhaul.integrations._attributes import replace_attribute
from backhaul.integrations._enable import Models
from backhaul.integrations._first_pass import IfNothingTravels
from backhaul.integrations._model import Layers
from backhaul.integrations._optimizer_steps import OptimizerSteps

_MODELS = Models(
    "it called torch.utils.checkpoint.checkpoint nowhere. Call its train(), or name the classes of its layers."
)


def enable(
    accelerator: Accelerator,
    model: nn.Module,
    worker: str | None = None,
    *,
    session: Session | None = None,
    layers: Layers | None = None,
    accumulate: bool | None = None,
    if_nothing_travels: IfNothingTravels = "raise",
    **arguments: Any,
) -> Session:
    """Lets workers recompute the layers of a model that a loop with Accelerate trains.

    Call it before or after `prepare`. If the loop accumulates gradients with `accelerator.accumulate(model)`, workers
    finish the backward of one micro-batch while the trainer goes on with the next: see docs/accumulation.md.

    Args:
        accelerator: The accelerator of the loop, whose `backward` the loop calls.
        model: The model whose layers become segments.
        worker: The address of a worker, or several; see `backhaul.connect`. None: starts one on this machine.
        session: The session to use instead of a new one.
        layers: Classes of the modules to checkpoint, for a model that has no checkpointing of its own.
        accumulate: Whether the micro-batches of an optimizer step are an accumulation block. None: if the accelerator
            accumulates several, and the model is not sharded.
        if_nothing_travels: What happens if the first forward shows that no segment can be recomputed by a worker:
            "raise" NotRemoteError, or "warn" with NotRemoteWarning.
        **arguments: Further arguments of `backhaul.connect`.

    Returns:
        The session, whose `report()` says what ran where. Close it after the training.

    Raises:
        ConnectError: No worker answers at one of the addresses.
        SettingError: There are arguments for a new session besides a session.
        ValueError: The model has neither layers of these classes nor checkpointing of its own.
    """
    session = _MODELS.enable(
        model, worker, session=session, layers=layers, if_nothing_travels=if_nothing_travels, **arguments
    )
    if accumulate is None:
        accumulate = accelerator.gradient_accumulation_steps > 1 and not is_sharded(accelerator)
    if accumulate:
        _defer(accelerator, OptimizerSteps(session))
    return session


def _defer(accelerator: Accelerator, steps: OptimizerSteps) -> None:
    """Makes the micro-batches between two optimizer steps a block, from `accumulate` to the last `backward`."""
    accumulate = accelerator.accumulate

    @functools.wraps(accumulate)
    @contextmanager
    def accumulate_in_a_block(*models: nn.Module) -> Iterator[None]:
        with accumulate(*models):
            if not steps.is_open:
                steps.begin()
            try:
                yield
            except Exception:
                # A loop that skips this micro-batch goes on with the gradients of those before it. If they are lost,
                # this raises another error, which the loop does not expect and so does not overlook.
                steps.end()
                raise
            except BaseException:
                steps.abandon()
                raise
            if accelerator.sync_gradients:
                steps.end()

    replace_attribute(accelerator, "backward", defer_backward(accelerator, steps))
    replace_attribute(accelerator, "accumulate", accumulate_in_a_block)
