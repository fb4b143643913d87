"""The cases that tests run with torchrun, by name. Each returns what must be equal with and without Backhaul."""

from collections.abc import Callable
from functools import partial

import torch
from torch.distributed import pipelining

from distributed import accumulation, data_parallel, model_parallel, sharded, workers
from distributed.training import Ranks, Results

Case = Callable[[Ranks], Results]

CASES: dict[str, Case] = {
    "ddp": partial(data_parallel.data_parallel, micro_batches=2, keeps_gradients=True),
    "ddp with gradients in buckets": partial(
        data_parallel.data_parallel, micro_batches=2, keeps_gradients=True, gradient_as_bucket_view=True
    ),
    "ddp with a static graph": partial(data_parallel.data_parallel, static_graph=True),
    "ddp with unused parameters": data_parallel.unused,
    "block": accumulation.accumulating,
    "block with gradients in buckets": partial(accumulation.accumulating, gradient_as_bucket_view=True),
    "block with a static graph": accumulation.with_a_static_graph,
    "block with unused parameters": partial(data_parallel.unused, micro_batches=3, accumulates=True),
    "block with parameters that no rank reduces": partial(
        data_parallel.unused, is_equal=True, micro_batches=3, accumulates=True
    ),
    "block with an unused output": accumulation.with_an_unused_output,
    "block with a plain backward": accumulation.with_a_plain_backward,
    "block with collectives": accumulation.with_collectives,
    "tensor parallel": model_parallel.tensor_parallel,
    "collectives": model_parallel.collectives,
    "gpipe": partial(model_parallel.pipeline, schedule=pipelining.ScheduleGPipe),
    "1f1b": partial(model_parallel.pipeline, schedule=pipelining.Schedule1F1B),
}
"""Cases for any number of ranks."""

SHARDED: dict[str, Case] = {
    "fsdp": sharded.sharded,
    "fsdp of the whole model": partial(sharded.sharded, shards_blocks=False),
    "fsdp in bfloat16": partial(sharded.sharded, reshard_after_forward=False, dtype=torch.bfloat16),
}
"""Cases with FSDP. After one of them a process can't open accumulation blocks any more, so they come last."""

MORE: dict[str, Case] = {
    "ddp in bfloat16": partial(data_parallel.data_parallel, dtype=torch.bfloat16),
    "ddp with batch norm": partial(data_parallel.data_parallel, kind=data_parallel.Normalized),
    "ddp, patched": data_parallel.patched,
    "ddp, patched and reentrant": partial(data_parallel.patched, use_reentrant=True, static_graph=True),
    "ddp, compiled": data_parallel.compiled,
    "ddp with compression": data_parallel.compressed,
    "ddp with uneven inputs": data_parallel.uneven,
    "ddp with two sessions": data_parallel.two_sessions,
    "replicate": data_parallel.replicated,
    "block with two models": accumulation.with_two_models,
    "block that runs again": accumulation.run_again,
    "block with compression": partial(data_parallel.compressed, micro_batches=2, accumulates=True),
    "tensor parallel, wrapped last": partial(model_parallel.tensor_parallel, is_wrapped_last=True),
    "tensor parallel in a block": partial(model_parallel.tensor_parallel, accumulates=True),
    "collectives in backward": partial(model_parallel.collectives, kind=model_parallel.Differentiating),
    "interleaved 1f1b": partial(model_parallel.pipeline, schedule=pipelining.ScheduleInterleaved1F1B, stages=2),
    "zero bubble": partial(model_parallel.pipeline, schedule=pipelining.ScheduleInterleavedZeroBubble, stages=2),
    "zero bubble, folded": partial(
        model_parallel.pipeline, schedule=pipelining.ScheduleZBVZeroBubble, stages=2, is_folded=True
    ),
}
"""More combinations."""

MORE_SHARDED: dict[str, Case] = {
    "fsdp 1": sharded.in_the_first_version,
    "fsdp 1, flat": partial(sharded.in_the_first_version, use_orig_params=False),
    "fsdp, wrapped last": partial(sharded.sharded, is_wrapped_last=True),
    "fsdp, called": sharded.called,
    "fsdp, compiled": sharded.compiled,
    "fsdp, called by its method": partial(sharded.called, call=lambda block: block.__call__),
    "fsdp in a mesh": sharded.in_a_mesh,
    "fsdp in groups": sharded.in_groups,
    "fsdp with its own accumulation": sharded.accumulating_by_itself,
    "fsdp twice": sharded.twice,
    "fsdp and tensor parallel": model_parallel.tensor_parallel_and_sharded,
}
"""More combinations with FSDP."""

KEEPING: dict[str, Case] = {
    "fsdp with kept regions": partial(sharded.sharded, kind=sharded.Keeping, dtype=torch.bfloat16),
}
"""Cases with FSDP whose segments cannot return gradients."""

WORKERS: dict[str, Case] = {
    "one copy": workers.sharing,
    "workers that end": workers.losing_workers,
}
"""Cases that need certain workers or variables of the environment."""

ERRORS: dict[str, tuple[Case, str]] = {
    "block in which every micro-batch reduces": (
        partial(accumulation.reducing, synchronizes=lambda _: True),
        "reduces its gradients in micro-batch 1 of the block, but a later one uses it as well",
    ),
    "block that reduces too early": (
        partial(accumulation.reducing, synchronizes=lambda left: left == 1),
        "reduces its gradients in micro-batch 1 of the block, but a later one uses it as well",
    ),
    "block that begins a static graph": (
        accumulation.beginning_a_static_graph,
        "can't be used for the first step of a DistributedDataParallel model with static_graph=True",
    ),
    "block that runs again with unused parameters": (
        partial(accumulation.run_again, find_unused_parameters=True),
        "still expects the reduction of a block that has failed",
    ),
    "block with fsdp 1": (
        partial(sharded.in_the_first_version, accumulates=True),
        "can't be used in a process that has a model of FSDP",
    ),
    "block with fsdp": (sharded.in_a_block, "can't be used in a process that has a model of FSDP"),
}
"""Cases that are an AccumulationError on every rank, with a part of its message."""

ALL = {
    **CASES,
    **SHARDED,
    **MORE,
    **MORE_SHARDED,
    **KEEPING,
    **WORKERS,
    **{name: case for name, (case, _) in ERRORS.items()},
}
