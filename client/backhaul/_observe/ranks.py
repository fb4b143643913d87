"""Which of the trainers of a distributed training this process is."""

import os
from collections.abc import Mapping

import torch.distributed as dist


def rank_and_world(environment: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """Returns the rank of this process and the number of all; (0, 0) if it trains alone.

    The process group tells them, or before it exists the variables RANK and WORLD_SIZE that torchrun sets.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    try:
        rank, world_size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    except (KeyError, ValueError):
        return 0, 0
    return (rank, world_size) if 0 <= rank < world_size else (0, 0)
