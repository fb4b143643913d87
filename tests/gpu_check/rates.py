"""Bytes each second between trainer and worker, and how the trainer's memory grows with depth."""

import time
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torchs

import backhaul
from gpu_check.models import LOW
from gpu_check.results import DEVICE, IS_REAL, ON_GPU, guarded, note, sized, synchronize
from gpu_check.workers import QUIET, connect, worker
from support.bits import Checkpoint, plainly

OVER_TCP = backhaul.Settings(silence_s=QUIET.silence_s, shared_memory=False, unix_socket=False)


def rates() -> None:
    """A segment that only moves data."""
    size = sized(256 << 20, 4 << 20)
    links = {"as chosen": QUIET, "over TCP": OVER_TCP}
    with worker() as process:
        for link, settings in links.items():
            with guarded(link), backhaul.connect(process.address, settings=settings) as session:
                took = []
                for number in range(3):
                    x = torch.full((size // 4,), 0.1 + number, device=DEVICE, requires_grad=True)
                    synchronize()
                    began = time.perf_counter()
                    y = session.checkpoint(torch.exp, x * 1.0, returns="gradients")
                    y.backward(torch.full_like(y, 0.5 + number))
                    synchronize()
                    took.append(time.perf_counter() - began)
                report = session.report()
                rate = round(3 * size / min(took) / 1e9, 2)  # input, gradient, and the gradient that comes back
                note(link, None, GB_per_s=rate, step_ms=round(min(took) * 1e3, 1), fallbacks=report.fallbacks)


def peak(checkpoint: Checkpoint, blocks: int) -> float:
    """Megabytes at the highest point of a step."""
    width, length = sized(2048, 64), sized(4096, 32)
    torch.manual_seed(0)
    with torch.device(DEVICE):
        made = [
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(blocks)
        ]
    model = nn.ModuleList(made).to(LOW)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    most = 0
    for _ in range(2):
        y = torch.randn(1, length, width, device=DEVICE, dtype=LOW)
        synchronize()
        base = 0
        if ON_GPU:
            torch.cuda.reset_peak_memory_stats()
            base = torch.cuda.memory_allocated()
        for block in model:
            y = checkpoint(block, y)
        y.float().square().mean().backward()
        synchronize()
        most = torch.cuda.max_memory_allocated() - base if ON_GPU else 0
    return round(most / 1e6, 1)


def depth() -> None:
    """The peak of few and of many blocks, in three ways."""
    with worker() as process:
        for blocks in (4, 16) if IS_REAL else (2, 3):
            with guarded(f"{blocks} blocks"), connect(process, returns="gradients") as session:
                peaks = {
                    "plain_MB": peak(plainly, blocks),
                    "torch_MB": peak(partial(torchs, use_reentrant=False), blocks),
                    "backhaul_MB": peak(session.checkpoint, blocks),
                }
                note(f"peak of {blocks} blocks", None, **peaks, fallbacks=session.report().fallbacks)
