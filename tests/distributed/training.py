"""A model that several ranks train, with or without Backhaul."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import gelu
from torch.nn.parallel import DistributedDataParallel

from backhaul import Session
from support.bits import Checkpoint, plainly

WIDTH, BLOCKS, STEPS = 16, 3, 3

Results = list[Tensor | None]
"""All that must be equal with and without Backhaul."""


@dataclass(frozen=True)
class Ranks:
    """A training of several ranks, as one of them sees it.

    Attributes:
        session: The session of this rank; None to train without Backhaul.
        options: Options of its segments.
    """

    session: Session | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def world(self) -> int:
        return dist.get_world_size()

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Runs a segment."""
        run: Checkpoint = plainly if self.session is None else partial(self.session.checkpoint, **self.options)
        return run(function, *args)

    def wrapped(self, model: Any, kind: type[nn.Module] | None = None) -> Any:
        """Makes the blocks of a model segments, in place."""
        if self.session is not None:
            self.session.wrap(model, kind or Block, **self.options)
        return model

    @contextmanager
    def accumulating(self, *, is_on: bool = True) -> Iterator[Callable[[Tensor], None]]:
        """Opens an accumulation block. Yields what runs backward."""
        if self.session is None or not is_on:
            yield Tensor.backward
        else:
            with self.session.accumulate() as block:
                yield block.backward

    def data(self) -> Tensor:
        """Returns the data of the next micro-batch."""
        return torch.randn(4, WIDTH)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    """Blocks between an embedding and a head that share a weight."""

    def __init__(self, call: Callable[..., Any] = plainly, kind: type[nn.Module] = Block) -> None:
        super().__init__()
        self.embedding, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head.weight = self.embedding.weight
        self.blocks = nn.ModuleList(kind() for _ in range(BLOCKS))
        self.call = call

    def forward(self, x: Tensor) -> Any:
        x = self.embedding(x)
        for block in self.blocks:
            x = self.call(block, x)
        return self.head(x)


def local(tensor: Tensor | None) -> Tensor | None:
    """Returns a copy of what this rank has of a tensor."""
    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return None if part is None else part.detach().clone()


def gradients(*models: nn.Module) -> Results:
    """Returns copies of the gradients of models, and clears them."""
    copies = [local(parameter.grad) for model in models for parameter in model.parameters()]
    for model in models:
        model.zero_grad()
    return copies


def trained(
    ranks: Ranks,
    model: Any,
    *,
    steps: int = STEPS,
    micro_batches: int = 1,
    synchronizes: Callable[[int], bool] = lambda left: left == 0,
    accumulates: bool = False,
    keeps_gradients: bool = False,
    same_data: bool = False,
    dtype: torch.dtype | None = None,
) -> Results:
    """Trains a model. Returns losses, gradients of each step, and the parameters and buffers at the end.

    Args:
        ranks: The training.
        model: The model, which may be one of DDP or FSDP.
        steps: Steps of the optimizer.
        micro_batches: Micro-batches in each step.
        synchronizes: Whether a micro-batch reduces gradients, by the number of those that follow it.
        accumulates: Whether the micro-batches of a step are an accumulation block.
        keeps_gradients: Whether every other step begins with the gradients of the one before.
        same_data: Whether all ranks have the same data, as with tensor parallelism.
        dtype: The dtype of autocast; None for none.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(1 if same_data else 1 + ranks.rank)
    results: Results = []
    for step in range(steps):
        with ranks.accumulating(is_on=accumulates) as backward:
            for left in reversed(range(micro_batches)):
                is_quiet = isinstance(model, DistributedDataParallel) and not synchronizes(left)
                with model.no_sync() if is_quiet else nullcontext():
                    with torch.autocast("cpu", dtype) if dtype is not None else nullcontext():
                        loss = model(ranks.data()).square().mean()
                    backward(loss)
        results += [loss.detach(), *[local(parameter.grad) for parameter in model.parameters()]]
        optimizer.step()
        if step % 2 or not keeps_gradients:
            optimizer.zero_grad()
    return [*results, *map(local, model.parameters()), *map(local, model.buffers())]
