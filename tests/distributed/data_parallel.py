"""Trainings with DistributedDataParallel (DDP)."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint as torchs_checkpoint

import backhaul
from distributed.training import BLOCKS, STEPS, WIDTH, Block, Net, Ranks, Results, gradients, trained
from support.bits import plainly


def data_parallel(
    ranks: Ranks,
    kind: type[nn.Module] = Block,
    *,
    micro_batches: int = 1,
    keeps_gradients: bool = False,
    dtype: torch.dtype | None = None,
    **ddp: Any,
) -> Results:
    model = DistributedDataParallel(Net(ranks.call, kind), **ddp)
    return trained(ranks, model, micro_batches=micro_batches, keeps_gradients=keeps_gradients, dtype=dtype)


class Skipping(Net):
    """Leaves out another block in each call.

    Args:
        call: Runs a segment.
        is_equal: Whether all ranks leave out the same block.
    """

    calls = 0

    def __init__(self, call: Callable[..., Any], *, is_equal: bool) -> None:
        super().__init__(call)
        self.is_equal = is_equal

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        skipped = (self.calls + (0 if self.is_equal else dist.get_rank())) % BLOCKS
        x = self.embedding(x)
        for number, block in enumerate(self.blocks):
            if number != skipped:
                x = self.call(block, x)
        return self.head(x)


def unused(ranks: Ranks, *, is_equal: bool = False, **options: Any) -> Results:
    model = DistributedDataParallel(Skipping(ranks.call, is_equal=is_equal), find_unused_parameters=True)
    return trained(ranks, model, **options)


class Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x)).tanh()


def patched(ranks: Ranks, *, use_reentrant: bool = False, **ddp: Any) -> Results:
    call = plainly if ranks.session is None else partial(torchs_checkpoint, use_reentrant=use_reentrant)
    model = DistributedDataParallel(Net(call), **ddp)
    with nullcontext() if ranks.session is None else ranks.session.patched():
        return trained(ranks, model)


def compiled(ranks: Ranks) -> Results:
    return trained(ranks, torch.compile(DistributedDataParallel(Net(ranks.call)), backend="eager"))


def compressed(ranks: Ranks, **options: Any) -> Results:
    """Reduces gradients with a hook of DDP that depends on the earlier ones."""
    model = DistributedDataParallel(Net(ranks.call))
    model.register_comm_hook(PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2), powerSGD_hook)
    return trained(ranks, model, steps=4, **options)


def uneven(ranks: Ranks) -> Results:
    """Each rank has another number of batches."""
    model = DistributedDataParallel(Net(ranks.call))
    torch.manual_seed(1 + ranks.rank)
    results: Results = []
    with model.join():
        for _ in range(2 + ranks.rank):
            model(ranks.data()).square().mean().backward()
            results += gradients(model)
    return results


def replicated(ranks: Ranks) -> Results:
    """Takes torch's function that makes a model data-parallel in place."""
    from torch.distributed._composable.replicate import replicate

    model: Any = replicate(Net(ranks.call))
    torch.manual_seed(1 + ranks.rank)
    results: Results = []
    for _ in range(STEPS):
        with ranks.accumulating() as backward:
            for left in (1, 0):
                model.set_requires_gradient_sync(left == 0)
                backward(model(ranks.data()).square().mean())
        results += gradients(model)
    return results


def two_sessions(ranks: Ranks) -> Results:
    """The segments of a model belong to two sessions in turns."""
    if ranks.session is None:
        return data_parallel(ranks)
    with backhaul.connect(ranks.session.workers, settings=backhaul.Settings(silence_s=240)) as other:
        sessions = [ranks.session, other] * (BLOCKS * STEPS)

        def call(function: Callable[..., Any], *args: Any) -> Any:
            return sessions.pop().checkpoint(function, *args)

        return trained(ranks, DistributedDataParallel(Net(call)))
