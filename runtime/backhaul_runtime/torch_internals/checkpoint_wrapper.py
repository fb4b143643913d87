"""Torch's wrapper for modules that are checkpointed, which FSDP and others recognise."""

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

__all__ = ["CheckpointWrapper", "inside_of"]


def inside_of(wrapper: CheckpointWrapper) -> nn.Module:
    """The module that a wrapper runs and whose parameters it shows as its own."""
    inside: nn.Module = wrapper._checkpoint_wrapped_module
    return inside
