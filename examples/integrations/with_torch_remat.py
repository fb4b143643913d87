"""Trains a small transformer whose attention keeps its activations, after the example of torch_remat's documentation.

    python examples/integrations/with_torch_remat.py gpu-box:50051

The two lines of Backhaul are marked. Without an address a worker is started on this machine.
"""

import sys
from types import ModuleType

import torch
import torch_remat
from torch import Tensor, nn
from torch.nn import functional

import backhaul
import backhaul.integrations.torch_remat  # <- Backhaul: `import ... as remat`, in place of torch_remat

WIDTH, HEADS, BLOCKS, STEPS = 64, 4, 4, 10


class Attention(nn.Module):
    """Causal self-attention. Takes and returns [batch, tokens, width]."""

    def __init__(self) -> None:
        super().__init__()
        self.query_key_value, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Returns what each token draws from those before it."""
        heads = self.query_key_value(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return self.out(functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A block whose attention is a region that keeps its activations."""

    def __init__(self, remat: ModuleType) -> None:
        super().__init__()
        self.remat = remat
        self.attention_norm, self.feed_forward_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.feed_forward = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Returns [batch, tokens, width]."""
        attention = self.remat.region(self.attention, "attention", recompute=False)(self.attention_norm(x))
        self.remat.recompute_needs_tensor(attention)
        x = x + attention
        return x + self.remat.region(self.feed_forward, "feed_forward", recompute=True)(self.feed_forward_norm(x))


class Model(nn.Module):
    """Predicts the next token."""

    def __init__(self, remat: ModuleType) -> None:
        super().__init__()
        self.remat = remat
        self.embedding, self.head = nn.Embedding(256, WIDTH), nn.Linear(WIDTH, 256)
        self.blocks = nn.ModuleList(Block(remat) for _ in range(BLOCKS))

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns the loss for tokens of shape [batch, tokens]."""
        x = self.embedding(tokens[:, :-1])
        for number, block in enumerate(self.blocks):
            x = self.remat.checkpoint(region_name=f"blocks.{number}")(block)(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())


def train(worker: str | None, *, remote: bool = True) -> tuple[nn.Module, backhaul.Report | None]:
    """Trains the model, and returns it with the report of the session; without Backhaul if `remote` is False."""
    torch.manual_seed(0)
    session = backhaul.connect(worker) if remote else None  # <- Backhaul
    model = Model(backhaul.integrations.torch_remat if remote else torch_remat)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _step in range(STEPS):
        optimizer.zero_grad()
        loss = model(torch.randint(0, 256, (4, 65)))
        loss.backward()
        optimizer.step()
    if session is None:
        return model, None
    report = session.report()
    session.close()
    return model, report


if __name__ == "__main__":
    print(train(sys.argv[1] if len(sys.argv) > 1 else None)[1])
