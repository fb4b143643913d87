"""Accumulation blocks of models of DistributedDataParallel (DDP)."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from distributed.training import BLOCKS, STEPS, WIDTH, Net, Ranks, Results, gradients, trained


def accumulating(ranks: Ranks, **ddp: Any) -> Results:
    model = DistributedDataParallel(ranks.wrapped(Net()), **ddp)
    return trained(ranks, model, steps=4, micro_batches=3, accumulates=True, keeps_gradients=True)


def with_a_static_graph(ranks: Ranks) -> Results:
    """The first step is outside of a block."""
    model = DistributedDataParallel(Net(ranks.call), static_graph=True)
    first = trained(ranks, model, steps=1)
    return first + trained(ranks, model, micro_batches=3, accumulates=True)


def with_a_plain_backward(ranks: Ranks) -> Results:
    """The micro-batch that reduces runs its backward itself, inside the block."""
    model = DistributedDataParallel(Net(ranks.call))
    torch.manual_seed(1 + ranks.rank)
    results: Results = []
    for _ in range(STEPS):
        with ranks.accumulating() as backward:
            for _ in range(2):
                with model.no_sync():
                    backward(model(ranks.data()).sum())
            model(ranks.data()).sum().backward()
        results += gradients(model)
    return results


def with_two_models(ranks: Ranks) -> Results:
    """One model reduces before the other one, and a backward outside of the block's comes between."""
    first, second = (DistributedDataParallel(Net(ranks.call)) for _ in range(2))
    torch.manual_seed(1 + ranks.rank)
    results: Results = []
    for _ in range(STEPS):
        with ranks.accumulating() as backward:
            with first.no_sync():
                backward(first(ranks.data()).square().mean())
            loss = first(ranks.data()).sum()
            second(ranks.data()).sum().backward()
            backward(loss)
            with second.no_sync():
                backward(second(ranks.data()).sum())
            backward(second(ranks.data()).square().mean())
        results += gradients(first, second)
    return results


def run_again(ranks: Ranks, **ddp: Any) -> Results:
    """Every block fails once at its end, and is run again."""
    model = DistributedDataParallel(Net(ranks.call), **ddp)
    torch.manual_seed(1 + ranks.rank)

    def step(batch: Tensor, *, fails: bool) -> None:
        torch.manual_seed(ranks.rank)
        with ranks.accumulating() as backward:
            for number, data in enumerate(batch):
                with model.no_sync() if number < len(batch) - 1 else nullcontext():
                    backward(model(data).square().mean())
            if fails:
                raise ArithmeticError

    results: Results = []
    for batch in torch.randn(STEPS, 3, 4, WIDTH):
        if ranks.session is not None:
            try:
                step(batch, fails=True)
            except ArithmeticError:
                assert all(parameter.grad is None for parameter in model.parameters())
        step(batch, fails=False)
        results += gradients(model)
    return results


class TwoOutputs(Net):
    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__(call)
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return y, self.other(y)


def with_an_unused_output(ranks: Ranks) -> Results:
    """The last micro-batch uses one output. Parameters of the other one are in the graph, and get no gradient."""
    model = DistributedDataParallel(TwoOutputs(ranks.call), find_unused_parameters=True)
    torch.manual_seed(1 + ranks.rank)
    results: Results = []
    for step in range(STEPS):
        with ranks.accumulating() as backward:
            for number in range(3):
                with model.no_sync() if number < 2 else nullcontext():
                    first, second = model(ranks.data())
                    backward(first.square().mean() + (second.sum() if step and number < 2 else 0))
        results += gradients(model)
    return results


class Meeting(torch.autograd.Function):
    """Takes the mean of all ranks away, in backward too, as a synchronized normalization does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return Meeting.backward(ctx, x)

    @staticmethod
    def backward(ctx: Any, x: Tensor) -> Tensor:
        mean = x.mean(0, keepdim=True).clone()
        dist.all_reduce(mean)
        return x - mean / dist.get_world_size()


class MeetingNet(Net):
    """The ranks meet before the last segment."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for number, block in enumerate(self.blocks):
            x = self.call(block, Meeting.apply(x) if number == BLOCKS - 1 else x)
        return self.head(x)


def with_collectives(ranks: Ranks) -> Results:
    model = DistributedDataParallel(MeetingNet(ranks.call))
    return trained(ranks, model, steps=4, micro_batches=4, accumulates=True)


def reducing(ranks: Ranks, synchronizes: Callable[[int], bool]) -> Results:
    model = DistributedDataParallel(Net(ranks.call))
    return trained(ranks, model, micro_batches=2, accumulates=True, synchronizes=synchronizes)


def beginning_a_static_graph(ranks: Ranks) -> Results:
    model = DistributedDataParallel(Net(ranks.call), static_graph=True)
    return trained(ranks, model, accumulates=True)
