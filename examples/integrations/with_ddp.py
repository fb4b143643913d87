"""Trains a small transformer with DistributedDataParallel, after torch's tutorial on it.

    torchrun --nproc-per-node 2 examples/integrations/with_ddp.py gpu-box:50051

The two lines of Backhaul are marked. Without an address each rank starts a worker on its machine.
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import backhaul
import backhaul.integrations.distributed  # <- Backhaul

WIDTH, BLOCKS, STEPS = 64, 4, 10


class Model(nn.Module):
    """Predicts the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(256, WIDTH), nn.Linear(WIDTH, 256)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True, norm_first=True) for _ in range(BLOCKS)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns the loss for tokens of shape [batch, tokens]."""
        x = self.embedding(tokens[:, :-1])
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return functional.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())


def train(worker: str | None, *, remote: bool = True) -> tuple[nn.Module, backhaul.Report | None]:
    """Trains the model, and returns it with the report of the session; without Backhaul if `remote` is False."""
    torch.manual_seed(0)
    module = Model()
    if remote:
        backhaul.integrations.distributed.wrap(module, nn.TransformerEncoderLayer, worker)  # <- Backhaul
    model = DistributedDataParallel(module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1 + dist.get_rank())  # each rank has other data
    for _step in range(STEPS):
        optimizer.zero_grad()
        loss = model(torch.randint(0, 256, (4, 65)))
        loss.backward()
        optimizer.step()
    if not remote:
        return module, None
    report = backhaul.current_session().report()
    backhaul.current_session().close()
    return module, report


if __name__ == "__main__":
    dist.init_process_group("gloo")
    _, report = train(sys.argv[1] if len(sys.argv) > 1 else None)
    if dist.get_rank() == 0:
        print(report)
    dist.destroy_process_group()
