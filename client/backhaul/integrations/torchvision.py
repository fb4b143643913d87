"""Models of torchvision, which have no checkpointing of their own. See docs/integrations/torchvision.md."""

from typing import Any

import torch
from torch import nn
from torchvision.models import (
    convnext,
    efficientnet,
    maxvit,
    mobilenetv2,
    mobilenetv3,
    regnet,
    resnet,
    shufflenetv2,
    swin_transformer,
    vision_transformer,
)

from backhaul._session import Session
from backhaul.integrations._first_pass import FirstPass, IfNothingTravels
from backhaul.integrations._model import Layers
from backhaul.integrations._sessions import session_of

BLOCKS: tuple[type[nn.Module], ...] = (
    convnext.CNBlock,
    efficientnet.FusedMBConv,
    efficientnet.MBConv,
    maxvit.MaxVitLayer,
    mobilenetv2.InvertedResidual,
    mobilenetv3.InvertedResidual,
    regnet.ResBottleneckBlock,
    resnet.BasicBlock,
    resnet.Bottleneck,
    shufflenetv2.InvertedResidual,
    swin_transformer.SwinTransformerBlock,
    vision_transformer.EncoderBlock,
)
"""The residual blocks of torchvision's models, each of which becomes a segment."""


def enable(
    model: nn.Module,
    worker: str | None = None,
    *,
    session: Session | None = None,
    layers: Layers = BLOCKS,
    if_nothing_travels: IfNothingTravels = "raise",
    **settings: Any,
) -> Session:
    """Lets workers recompute the blocks of a model. Names of modules and keys of `state_dict` stay the same.

    Args:
        model: A model of torchvision, or one that contains its blocks.
        worker: The address of a worker, or several; see `backhaul.connect`. None: starts one on this machine.
        session: The session to use instead of a new one.
        layers: Classes of the modules to checkpoint. With nn.Sequential, each stage of a ResNet is one segment.
        if_nothing_travels: What happens if the first forward shows that no segment can be recomputed by a worker:
            "raise" NotRemoteError, or "warn" with NotRemoteWarning.
        **settings: Further settings of `backhaul.connect`.

    Returns:
        The session, whose `report()` says what ran where. Close it after the training.

    Raises:
        ConnectError: No worker answers at one of the addresses.
        SettingError: There are settings for a new session besides a session.
        ValueError: The model has no modules of these classes.
    """
    session = session_of(session, worker, settings)
    session.wrap(model, layers)
    first_pass = FirstPass(session, type(model).__name__, if_nothing_travels, "none of its blocks ran.")

    def forward_ended(model: nn.Module, args: Any, output: Any) -> None:
        if model.training and torch.is_grad_enabled():
            first_pass.ended()
            hook.remove()

    hook = model.register_forward_hook(forward_ended)
    return session
