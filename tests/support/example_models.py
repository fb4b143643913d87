"""Models for `--model`, small enough to be measured in a second."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  torch's own name for it


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


class CustomLayer(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(Scale.apply(x).tanh())


class Model(nn.Module):
    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class BrokenModel(Model):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("the shapes do not fit")


def plain(layers: int = 4, width: int = 32) -> tuple[nn.Module, Tensor]:
    return Model([Layer(width) for _ in range(layers)]), torch.randn(8, width)


def with_keywords_and_loss() -> tuple[nn.Module, dict[str, Tensor], Any]:
    model, x = plain()
    return model, {"x": x}, Tensor.sum


def lora() -> tuple[nn.Module, tuple[Tensor]]:
    model, x = plain()
    model.requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("down.bias" in name)
    return model, (x,)


def custom() -> tuple[nn.Module, Tensor]:
    return Model([CustomLayer(8), CustomLayer(8)]), torch.randn(2, 8, requires_grad=True)


def partly_custom() -> tuple[nn.Module, Tensor]:
    return Model([Layer(8), CustomLayer(8), CustomLayer(8)]), torch.randn(2, 8)


class _Chain(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(8) for _ in range(layers))

    def begin(self, rows: int, seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(rows, 8, generator=generator), torch.zeros(rows, 8)

    def loss(self, x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(x, target)


def of_experiment(layers: int, batch: int, seed: int) -> nn.Module:
    return _Chain(layers)


def broken() -> tuple[nn.Module, Tensor]:
    return BrokenModel([Layer(8), Layer(8)]), torch.randn(2, 8)


def without_layers() -> tuple[nn.Module, Tensor]:
    return nn.Linear(8, 8), torch.randn(2, 8)


def without_gradients() -> tuple[nn.Module, Tensor]:
    return plain()[0].requires_grad_(False), torch.randn(8, 32)


def nothing() -> None:
    return None


def raising() -> None:
    raise KeyError("config")
