"""Run by a test: two processes train a model that they share, each way with and without checkpointing.

python sharded_trainer.py WORKER FOLDER

Forks once all is imported, so that this is done once. Each process writes what it found to a file named by its rank.
"""

import json
import os
import sys
from functools import partial
from pathlib import Path

import torch
import torch._dynamo  # FSDP imports it later, in each process
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

import backhaul
from integration.test_sharded import Net, called, shard, trained, wrapped, wrapped_by_torch
from support.bits import differing


def main(worker: str, folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    expected = trained(lambda: shard(Net()))
    outcomes = {}
    for build in (wrapped, wrapped_by_torch, called):
        with backhaul.connect(worker, silence_s=30.0, strict=True) as session:
            ours = trained(partial(build, session, session.checkpoint))
            outcomes[build.__name__] = differing(ours, expected), session.report().remote
    dist.destroy_process_group()
    (folder / str(rank)).write_text(json.dumps(outcomes))


other = os.fork()
main(sys.argv[1], Path(sys.argv[2]), 1 if other else 0)
if other:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]))
