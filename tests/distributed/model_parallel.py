"""Trainings with tensor parallelism, with collectives inside segments, and with pipelines."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.nn.functional import all_reduce
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import gelu

from distributed.training import STEPS, WIDTH, Block, Net, Ranks, Results, gradients, trained

PLAN = {
    "blocks.[12].up": ColwiseParallel(),
    "blocks.[12].down": RowwiseParallel(),
}


class Whole(Block):
    """A block that is not split between ranks."""


def tensor_parallel(ranks: Ranks, *, is_wrapped_last: bool = False, accumulates: bool = False) -> Results:
    model: Any = Net()
    model.blocks[0] = Whole()
    if not is_wrapped_last:
        ranks.wrapped(model)
    parallelize_module(model, init_device_mesh("cpu", (ranks.world,)), PLAN)
    if is_wrapped_last:
        ranks.wrapped(model)
    return trained(ranks, model, same_data=True, micro_batches=2, accumulates=accumulates)


def tensor_parallel_and_sharded(ranks: Ranks) -> Results:
    mesh = init_device_mesh("cpu", (ranks.world // 2, 2), mesh_dim_names=("data", "model"))
    model: Any = parallelize_module(Net(), mesh["model"], PLAN)
    ranks.wrapped(model)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["data"])
    return trained(ranks, fully_shard(model, mesh=mesh["data"]), same_data=True)


class Reducing(Block):
    """Reduces an interior tensor and a buffer, and waits for the other ranks."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(32))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(self.norm(x)) + self.mean
        seen = hidden.detach().mean(0)
        dist.all_reduce(seen)
        self.mean.mul_(0.9).add_(seen)
        dist.broadcast(self.mean, 0)
        dist.barrier()
        return x + self.down(gelu(hidden) * seen)


class Differentiating(Block):
    """Reduces what gradients pass through."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(all_reduce(gelu(self.up(x))))


def collectives(ranks: Ranks, kind: type[Block] = Reducing) -> Results:
    model = Net(ranks.call)
    model.blocks[1] = kind()
    return trained(ranks, model)


class Stage(nn.Module):
    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.blocks, self.last = nn.ModuleList([Block(), Block()]), nn.Linear(WIDTH, WIDTH)
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.call(block, x)
        return self.last(x)


def pipeline(ranks: Ranks, schedule: Any, *, stages: int = 1, is_folded: bool = False) -> Results:
    """Trains a pipeline.

    Args:
        ranks: The training.
        schedule: The class of the schedule.
        stages: The number of stages of each rank.
        is_folded: Whether the last rank has the middle of the pipeline, and the first rank both ends.
    """
    count = ranks.world * stages
    numbers = [ranks.rank, count - 1 - ranks.rank] if is_folded else [*range(ranks.rank, count, ranks.world)]
    models = nn.ModuleList()
    for number in numbers:
        torch.manual_seed(number)
        models.append(Stage(ranks.call))
    parts = [
        PipelineStage(model, number, count, torch.device("cpu")) for model, number in zip(models, numbers, strict=True)
    ]
    torch.manual_seed(ranks.rank)
    run = schedule(parts if stages > 1 else parts[0], 2 * ranks.world, loss_fn=nn.MSELoss())
    optimizer = torch.optim.AdamW(models.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(3)
    results: Results = []
    for _ in range(STEPS):
        inputs, target = (torch.randn(4 * ranks.world, WIDTH, generator=generator) for _ in range(2))
        losses: Results = []
        given = {"target": target, "losses": losses} if count - 1 in numbers else {}
        run.step(*([inputs] if 0 in numbers else []), **given)
        optimizer.step()
        results += [*losses, *gradients(models), *[parameter.detach().clone() for parameter in models.parameters()]]
    return results
