"""Run by a test: two processes train with DDP, with and without accumulation blocks.

python distributed_trainer.py WORKER FOLDER

Each process writes to a file named by its rank which gradients and parameters differ from those of the plain loop.
"""

import json
import os
import sys
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[1]))

import backhaul
from support.bits import Checkpoint, differing, plainly

WIDTH, MICRO_BATCHES, STEPS = 16, 3, 4


class Net(nn.Module):
    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__()
        self.checkpoint = checkpoint
        self.embedding, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head.weight = self.embedding.weight
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        x = self.embedding(x)
        for block in self.blocks:
            x = self.checkpoint(block, x)
        return self.head(x)


def trained(checkpoint: Checkpoint, rank: int, accumulate: Any = None) -> list[Tensor | None]:
    """Returns the gradients of each step and the parameters. Every other step begins with gradients."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Net(checkpoint))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(1 + rank)
    results: list[Tensor | None] = []
    for step in range(STEPS):
        with ExitStack() as opened:
            block = opened.enter_context(accumulate()) if accumulate is not None else None
            for number in range(MICRO_BATCHES):
                with model.no_sync() if number < MICRO_BATCHES - 1 else nullcontext():
                    loss = model(torch.randn(4, WIDTH)).square().mean()
                    loss.backward() if block is None else block.backward(loss)
        results += [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        optimizer.step()
        if step % 2:
            optimizer.zero_grad()
    return [*results, *(parameter.detach() for parameter in model.parameters())]


def main(worker: str, folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    expected = trained(plainly, rank)
    with backhaul.connect(worker, silence_s=30.0) as session:
        ours = trained(session.checkpoint, rank, session.accumulate)
        outcome = differing(ours, expected), session.report().remote
    dist.destroy_process_group()
    (folder / str(rank)).write_text(json.dumps(outcome))


other = os.fork()
main(sys.argv[1], Path(sys.argv[2]), 1 if other else 0)
if other:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]))
