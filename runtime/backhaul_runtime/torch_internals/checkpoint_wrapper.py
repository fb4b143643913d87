"""Torch's wrapper module for checkpointed modules, which FSDP and other libraries recognise."""

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

__all__ = ["CheckpointWrapper", "inside_of"]


def inside_of(wrapper: CheckpointWrapper) -> nn.Module:
    """Returns the module that a wrapper runs, and whose parameters the wrapper exposes as its own."""
    inside: nn.Module = wrapper._checkpoint_wrapped_module
    return inside
