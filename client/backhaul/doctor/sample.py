"""The model with which a worker's speed is measured if the user names none."""

import torch
from torch import nn

from backhaul.doctor.profile.target import Target

_LAYERS = 4


def sample() -> Target:
    """Returns linear layers that are large enough for the device that this process computes on."""
    has_accelerator = torch.cuda.is_available()
    device = torch.device("cuda" if has_accelerator else "cpu")
    width, tokens = (8192, 4096) if has_accelerator else (1024, 512)
    dtype = torch.bfloat16 if has_accelerator else torch.float32

    class Layer(nn.Sequential):
        """A linear layer with an activation, whose class no other module has."""

    layers = [Layer(nn.Linear(width, width, device=device, dtype=dtype), nn.GELU()) for _ in range(_LAYERS)]
    model = nn.Sequential(*layers)
    x = torch.randn(tokens, width, device=device, dtype=dtype)
    return Target("four linear layers", model, lambda: model(x).float().square().mean(), (Layer,))
