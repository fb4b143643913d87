"""Small models whose ops cover what differs between a CPU and a GPU."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpu_check.results import DEVICE, IS_SIMULATED

WIDTH = 64
LOW = torch.float32 if IS_SIMULATED else torch.bfloat16
"""The simulated device runs the host's kernels, and that of layer norm's backward takes no statistics in float32."""
Context = Callable[[], AbstractContextManager[Any]]


class Transformer(nn.Module):
    """A block with attention."""

    def __init__(self, dropout: float = 0.0, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.n1, self.n2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        inner = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(dropout)
        self.mlp = nn.Sequential(*inner)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, WIDTH))
        return x + self.mlp(self.n2(x))


class Mlp(nn.Module):
    """A block without attention."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.n, self.a, self.b = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.p = dropout

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.b(F.silu(self.a(self.n(x)))), self.p)


class Lora(nn.Module):
    """A frozen layer with an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 8, bias=False), nn.Linear(8, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


class Conv(nn.Module):
    """A residual block of images."""

    def __init__(self) -> None:
        super().__init__()
        self.c, self.n = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.n(self.c(x)))


class Cell(nn.Module):
    """A recurrent network of two layers."""

    def __init__(self, kind: Callable[..., nn.Module], dropout: float = 0.0) -> None:
        super().__init__()
        self.cell = kind(WIDTH, WIDTH, num_layers=2, batch_first=True, dropout=dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.cell(x)[0]


class Embed(nn.Module):
    """Rows of a table that the input chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.a = nn.Embedding(97, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        ids = torch.arange(x.shape[1], device=x.device) % 97
        return x + self.a(self.table(ids) * x)


class Buffers(nn.Module):
    """A number on the host, a tensor made on the device, a view at an odd offset."""

    def __init__(self) -> None:
        super().__init__()
        self.scale: Tensor
        self.register_buffer("scale", torch.tensor(0.5), persistent=False)
        self.a = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made = torch.arange(WIDTH, device=x.device)[None] * 1e-3
        return 0.5 * torch.tanh(self.a(x)) + self.scale * made + x[..., 1:].mean()


def tokens(dtype: torch.dtype = torch.float32) -> Tensor:
    """A batch of rows of tokens."""
    return torch.randn(4, 32, WIDTH, device=DEVICE, dtype=dtype, requires_grad=True)


def images(last: bool = False) -> Tensor:
    """A batch of images."""
    x = torch.randn(4, 8, 16, 16, device=DEVICE)
    return x.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format).requires_grad_()


def autocast(dtype: torch.dtype = torch.bfloat16) -> Context:
    """Autocast on the device."""
    return lambda: torch.autocast(DEVICE, dtype=dtype)


def kernel(name: str) -> Context:
    """One of attention's backends."""
    return lambda: sdpa_kernel([getattr(SDPBackend, name)])


@dataclass(frozen=True)
class Case:
    """A model, and how it is trained."""

    build: Callable[[], nn.Module]
    inputs: Callable[[], Tensor] = tokens
    around: Context = nullcontext
    """Is around forward and backward, because torch's own checkpoint does not restore attention's backend."""

    dtype: torch.dtype = torch.float32
    last: bool = False
    """Whether the memory format is channels_last."""

    only_on_gpu: bool = False
    may_stay: bool = False
    """Whether the trainer may keep the call, because the op draws beside torch's generators."""


PLAIN = {
    "mlp": Case(Mlp),
    "mlp, dropout": Case(partial(Mlp, 0.3)),
    "mlp, bf16": Case(Mlp, partial(tokens, LOW), dtype=LOW),
    "mlp, autocast": Case(Mlp, around=autocast()),
    "lora": Case(Lora),
    "embedding": Case(Embed),
    "buffers": Case(Buffers),
}
ATTENTION = {
    "math": Case(Transformer, around=kernel("MATH")),
    "default fp32": Case(Transformer),
    "default bf16": Case(Transformer, partial(tokens, LOW), dtype=LOW),
    "default autocast, dropout": Case(partial(Transformer, 0.1), around=autocast()),
    "flash bf16": Case(Transformer, partial(tokens, LOW), kernel("FLASH_ATTENTION"), LOW, only_on_gpu=True),
    "flash, dropout": Case(
        partial(Transformer, 0.2), partial(tokens, LOW), kernel("FLASH_ATTENTION"), LOW, only_on_gpu=True
    ),
    "efficient fp32": Case(Transformer, around=kernel("EFFICIENT_ATTENTION"), only_on_gpu=True),
    "efficient, dropout": Case(partial(Transformer, 0.2), around=kernel("EFFICIENT_ATTENTION"), only_on_gpu=True),
    "cudnn bf16": Case(Transformer, partial(tokens, LOW), kernel("CUDNN_ATTENTION"), LOW, only_on_gpu=True),
    "cudnn, dropout": Case(
        partial(Transformer, 0.2), partial(tokens, LOW), kernel("CUDNN_ATTENTION"), LOW, only_on_gpu=True
    ),
}
RECURRENT = {
    "conv": Case(Conv, images),
    "conv, channels_last": Case(Conv, partial(images, True), last=True),
    "conv, channels_last, fp16": Case(
        Conv, partial(images, True), autocast(torch.float16), last=True, only_on_gpu=True
    ),
    "lstm": Case(partial(Cell, nn.LSTM)),
    "lstm, dropout": Case(partial(Cell, nn.LSTM, 0.4), may_stay=True),
    "gru": Case(partial(Cell, nn.GRU)),
    "gru, dropout": Case(partial(Cell, nn.GRU, 0.4), may_stay=True),
}
