"""Run by torchrun for a test: a rank that trains with DDP for some steps, with and without Backhaul.

torchrun ... rank.py FOLDER STEPS

The session's settings come from the environment. Each rank writes the number of the step that it is in to the file
`RANK.step`. Before the last step it waits until the file `done` is there, and writes the workers that are up to
`RANK.up` meanwhile. In the end it writes to `RANK.json` what differs, and which workers have computed.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[1]))

import backhaul
from support.bits import Checkpoint, differing, plainly

WIDTH, SEGMENTS = 32, 8
WAIT_S = 240.0


class Net(nn.Module):
    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__()
        self.checkpoint = checkpoint
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Dropout(0.1), nn.GELU())
            for _ in range(SEGMENTS)
        )

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = self.checkpoint(block, x)
        return x.square().mean()


def trained(checkpoint: Checkpoint, rank: int, steps: int, begin: Callable[[int], None]) -> list[Tensor | None]:
    """Returns the loss and the gradients of each step, and the parameters at the end."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Net(checkpoint))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(1 + rank)
    results: list[Tensor | None] = []
    for step in range(steps):
        begin(step)
        loss = model(torch.randn(4, WIDTH, requires_grad=True))
        loss.backward()
        results += [loss.detach(), *(None if p.grad is None else p.grad.clone() for p in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return [*results, *(parameter.detach() for parameter in model.parameters())]


def write(path: Path, text: str) -> None:
    """Replaces a file, so that no reader sees a part of it."""
    draft = path.with_suffix(".draft")
    draft.write_text(text)
    draft.replace(path)


def main(folder: Path, steps: int) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")

    expected = trained(plainly, rank, steps, lambda step: None)
    with backhaul.connect() as session:

        def begin(step: int) -> None:
            write(folder / f"{rank}.step", str(step))
            until = time.monotonic() + WAIT_S
            while step == steps - 1 and not (folder / "done").exists():
                assert time.monotonic() < until, "the test did not say that all has happened"
                up = [worker.connection.name for worker in session._workers if worker.up is not None]
                write(folder / f"{rank}.up", ",".join(up))
                time.sleep(0.05)

        ours = trained(session.checkpoint, rank, steps, begin)
        report = session.report()
        computed = [worker.connection.name for worker in session._workers if worker.connection.speed]
    outcome = {
        "differing": differing(ours, expected),
        "remote": report.remote,
        "fallbacks": report.fallbacks,
        "computed": computed,
    }
    (folder / f"{rank}.json").write_text(json.dumps(outcome))
    dist.destroy_process_group()


main(Path(sys.argv[1]), int(sys.argv[2]))
