"""Models of torchvision, which have no checkpointing of their own. See docs/integrations/torchvision.md."""

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

from backhaul.integrations._enable import Models

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

enable = Models("none of its blocks ran.", layers=BLOCKS).enable
