"""The accelerator of Accelerate, in loops of one's own and in the Trainer of Transformers."""

import functools
from collections.abc import Callable
from typing import Any

from backhaul.integrations._optimizer_steps import OptimizerSteps

_SHARDED = {"FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA"}
"""Kinds of training whose gradients are not on the trainer between two micro-batches."""


def is_sharded(accelerator: Any) -> bool:
    """Whether the model or its inputs are distributed over processes in another way than by DDP."""
    kind = getattr(accelerator.distributed_type, "value", "NO")
    return kind in _SHARDED or getattr(accelerator, "parallelism_config", None) is not None


def defer_backward(accelerator: Any, steps: OptimizerSteps) -> Callable[..., Any]:
    """Returns the accelerator's `backward` with each call as a micro-batch of the open block, which the last one ends.

    Args:
        accelerator: The accelerator, which knows which micro-batch is the last one of an optimizer step.
        steps: The blocks of the training.
    """
    backward = accelerator.backward

    @functools.wraps(backward)
    def backward_of_a_micro_batch(*args: Any, **kwargs: Any) -> Any:
        with steps.deferring():
            returned = backward(*args, **kwargs)
        if accelerator.sync_gradients:  # the loop clips gradients next
            steps.end()
        return returned

    return backward_of_a_micro_batch
