"""A byte-level transformer language model, an ordinary nn.Module.

Shapes: B batch, T length, C width.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  torch's own name for it

BYTES = 256
HEAD_WIDTH = 32

Checkpoint = Callable[..., Any]
"""A function that runs a block under checkpointing. It is called with the block and its arguments."""


class Block(nn.Module):
    """A pre-norm transformer block: attention and an MLP, each with a residual connection."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.heads = width // HEAD_WIDTH
        self.dropout = dropout
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Maps [B, T, C] to [B, T, C]."""
        x = x + self.attend(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]

    def attend(self, x: Tensor) -> Tensor:
        """Causal self-attention, [B, T, C] to [B, T, C]."""
        batch, length, width = x.shape
        parts = self.query_key_value(x).view(batch, length, 3, self.heads, HEAD_WIDTH).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind(0)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        mixed = self.projection(mixed.transpose(1, 2).reshape(batch, length, width))
        return F.dropout(mixed, self.dropout, self.training)


class LanguageModel(nn.Module):
    """Predicts the next byte of a text.

    Args:
        layers: Number of transformer blocks.
        width: Width C, a multiple of 32.
        context: Largest supported length T.
        dropout: Dropout probability in attention and after each half of a block.
    """

    def __init__(self, layers: int, width: int, context: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.bytes = nn.Embedding(BYTES, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, BYTES)

    def forward(self, text: Tensor, checkpoint: Checkpoint | None = None) -> Tensor:
        """Returns float logits of shape [B, T, 256] for int64 text of shape [B, T].

        Each block runs under `checkpoint` unless that is None.
        """
        x = self.bytes(text) + self.positions(torch.arange(text.shape[1], device=text.device))
        for block in self.blocks:
            x = block(x) if checkpoint is None else checkpoint(block, x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]
