"""Trainings with FSDP, mostly in its second version, `fully_shard`."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.nn.functional import gelu

from backhaul._backend import backend
from backhaul._torch_api.kept_regions import kept_region
from distributed.training import STEPS, Block, Net, Ranks, Results, gradients, trained


class Keeping(Block):
    """A block that keeps what its first product saves, a weight among it."""

    def forward(self, x: Tensor) -> Tensor:
        with kept_region():
            wide = gelu(self.up(self.norm(x)))
        return x + self.dropout(self.down(wide))


def sharded(
    ranks: Ranks,
    *,
    shards_blocks: bool = True,
    is_wrapped_last: bool = False,
    kind: type[nn.Module] = Block,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> Results:
    if dtype is not None:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    model = Net(kind=kind)
    if not is_wrapped_last:
        ranks.wrapped(model)
    for block in model.blocks if shards_blocks else ():
        fully_shard(block, **options)
    fully_shard(model, **options)
    return trained(ranks, ranks.wrapped(model) if is_wrapped_last else model)


def called(ranks: Ranks, call: Callable[[nn.Module], Callable[..., Any]] = lambda block: block) -> Results:
    model = Net(lambda block, x: ranks.call(call(block), x))
    for block in model.blocks:
        fully_shard(block)
    return trained(ranks, fully_shard(model))


def compiled(ranks: Ranks) -> Results:
    """Blocks that are compiled before they are sharded, as torchtitan does it."""
    torch.compiler.reset()
    model = Net()
    for block in model.blocks:
        block.compile(backend=backend)
        fully_shard(block)
    return trained(ranks, fully_shard(model))


def in_a_mesh(ranks: Ranks) -> Results:
    """Two replicas of a sharded model."""
    return sharded(ranks, mesh=init_device_mesh("cpu", (2, ranks.world // 2), mesh_dim_names=("replica", "shard")))


def in_groups(ranks: Ranks) -> Results:
    """Several blocks gather their weights together, and blocks prefetch those of others."""
    model = ranks.wrapped(Net())
    first, *others = model.blocks
    fully_shard(others)
    fully_shard(first).set_modules_to_forward_prefetch([others[0]])
    return trained(ranks, fully_shard(model))


def sharded_by_block(ranks: Ranks) -> Any:
    """A wrapped model of which each block is sharded, and the random state of the rank's data."""
    model: Any = ranks.wrapped(Net())
    for block in model.blocks:
        fully_shard(block)
    torch.manual_seed(1 + ranks.rank)
    return fully_shard(model)


def accumulating_by_itself(ranks: Ranks) -> Results:
    """Reduces gradients in one micro-batch of two, and keeps the weights until then."""
    model = sharded_by_block(ranks)
    results: Results = []
    for _ in range(STEPS):
        for left in (1, 0):
            model.set_requires_gradient_sync(left == 0)
            model.set_reshard_after_backward(left == 0)
            model(ranks.data()).square().mean().backward()
        results += gradients(model)
    return results


def twice(ranks: Ranks) -> Results:
    """Two forwards before a backward, and two backwards of a graph."""
    model = sharded_by_block(ranks)
    results: Results = []
    for _ in range(STEPS):
        (model(ranks.data()).square().mean() + model(ranks.data()).sum()).backward()
        output = model(ranks.data())
        output.sum().backward(retain_graph=True)
        output.square().mean().backward()
        results += gradients(model)
    return results


def in_the_first_version(ranks: Ranks, *, use_orig_params: bool = True, accumulates: bool = False) -> Results:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model: Any = ranks.wrapped(Net())
        model.head = nn.Linear(*model.head.weight.shape)
        options: dict[str, Any] = {"use_orig_params": use_orig_params, "device_id": torch.device("cpu")}
        for number, block in enumerate(model.blocks):
            model.blocks[number] = FullyShardedDataParallel(block, **options)
        model = FullyShardedDataParallel(model, **options)
        return trained(ranks, model, accumulates=accumulates)


def in_a_block(ranks: Ranks) -> Results:
    return trained(ranks, fully_shard(Net(ranks.call)), micro_batches=2, accumulates=True)
