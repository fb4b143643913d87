"""Counts how often two steps of an MLP wait for the device, by place and thread, without and with Backhaul.

    PYTHONPATH=tests python -m support.simulated_cuda python -m support.count_waits

Needs the simulated device, which counts. The figures are of two steps after a first one, whose calls nobody has
predicted.
"""

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import backhaul

SEGMENTS, STEPS, WIDTH = 6, 2, 64


class Waits(NamedTuple):
    """The waits of some steps, each as "what @ place in thread"."""

    forward: Counter[str]
    backward: Counter[str]


def count(checkpoint: Callable[[nn.Module, Tensor], Tensor]) -> Waits:
    """Counts the waits of steps in which this function runs each segment. Those of the optimizer do not count."""
    native: Any = sys.modules["simulated_cuda_device"].native
    torch.manual_seed(0)
    segments = nn.ModuleList(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU(), nn.Dropout(0.1)) for _ in range(SEGMENTS)
    ).cuda()
    optimizer = torch.optim.AdamW(segments.parameters())
    waits = Waits(Counter(), Counter())
    for step in range(1 + STEPS):
        x = torch.randn(16, WIDTH, device="cuda")
        torch.cuda.synchronize()
        native.reset_counters()
        for segment in segments:
            x = checkpoint(segment, x)
        loss = x.square().mean()
        forward = native.counters()["sync_calls"]
        native.reset_counters()
        loss.backward()
        backward = native.counters()["sync_calls"]
        if step:
            waits.forward.update(forward)
            waits.backward.update(backward)
        optimizer.step()
        optimizer.zero_grad()
    return waits


def of_trainer(waits: Counter[str]) -> int:
    """Returns the waits of the threads that train: the caller's, and autograd's. Others are Backhaul's own."""
    return sum(number for call, number in waits.items() if not call.rpartition(" in ")[2].startswith("backhaul-"))


def main() -> None:
    """Prints the counts."""
    with backhaul.connect(device="cuda") as session:
        for name, checkpoint in {
            "without checkpointing": lambda segment, x: segment(x),
            "gradients": lambda segment, x: session.checkpoint(segment, x, returns="gradients"),
            "activations": lambda segment, x: session.checkpoint(segment, x, returns="activations"),
        }.items():
            waits = count(checkpoint)
            for phase, counted in waits._asdict().items():
                sys.stdout.write(f"{name}, {phase}: {of_trainer(counted)} of the trainer, {counted.total()} in all\n")
                for call, number in counted.most_common():
                    sys.stdout.write(f"    {number:4d}  {call}\n")


if __name__ == "__main__":
    main()
