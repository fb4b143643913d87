"""Trainings whose workers end, or are shared."""

import os
import signal
from itertools import pairwise

import grpc
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from backhaul_proto.v1 import telemetry_pb2
from distributed.training import Net, Ranks, Results, gradients
from support.wire import Services

KILLED, DRAINED = "PIDS_TO_KILL", "PID_TO_DRAIN"
"""Variables of the environment with the processes of a worker: its supervisor and what that has started."""


def stored_bytes(address: str) -> int:
    """Returns the bytes of tensors that a worker stores."""
    with grpc.insecure_channel(address) as channel:
        memory = Services(channel).telemetry.GetTelemetry(telemetry_pb2.GetTelemetryRequest(), timeout=60).memory
    return int(memory.segment_bytes + memory.cached_bytes)


def sharing(ranks: Ranks) -> Results:
    """The ranks train equal weights one after the other. The worker stores them once.

    The weights are too small for shared memory, of which each session has its own.
    """
    torch.manual_seed(5)
    layer = nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)])
    sizes = [stored_bytes(ranks.session.workers)] if ranks.session is not None else []
    for turn in range(ranks.world):
        dist.barrier()
        if turn == ranks.rank:
            ranks.call(layer, torch.randn(4, 256)).sum().backward()
        dist.barrier()
        if ranks.session is not None:
            sizes.append(stored_bytes(ranks.session.workers))
    if ranks.session is not None:
        weights = sum(parameter.nbytes for parameter in layer.parameters())
        first, *others = [after - before for before, after in pairwise(sizes)]
        assert first >= weights, sizes
        assert sum(others) < weights / 10, sizes
    dist.barrier()
    return [parameter.grad for parameter in layer.parameters()]


def losing_workers(ranks: Ranks) -> Results:
    """One worker is killed between forward and backward, and another one drained."""
    model = DistributedDataParallel(Net(ranks.call))
    torch.manual_seed(1 + ranks.rank)
    results: Results = []
    for step in range(6):
        loss = model(ranks.data()).sum()
        if ranks.session is not None and ranks.rank == 0 and step == 1:
            for pid in map(int, os.environ[KILLED].split(",")):
                os.kill(pid, signal.SIGKILL)
        if ranks.session is not None and ranks.rank == 0 and step == 3:
            os.kill(int(os.environ[DRAINED]), signal.SIGTERM)
        dist.barrier()
        loss.backward()
        results += gradients(model)
    return results
