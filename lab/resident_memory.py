"""Prints by how much three steps raise the largest resident size of a trainer on a CPU.

"How to measure it" in docs/memory.md has the figures. Its argument is one of `METHODS`.
"""

import resource
import sys

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import backhaul

METHODS = ("plain", "torch", "backhaul")


def peak_mib() -> float:
    """Returns the largest resident size of this process so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main(method: str) -> None:
    """Trains eight layers for three steps with a method, one of `METHODS`."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    layers = nn.ModuleList(nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True) for _ in range(8))
    session = backhaul.connect() if method == "backhaul" else None
    before = peak_mib()
    for _ in range(3):
        x = torch.randn(4, 256, 256)
        for layer in layers:
            if session is not None:
                x = session.checkpoint(layer, x)
            else:
                x = checkpoint(layer, x, use_reentrant=False) if method == "torch" else layer(x)
        x.square().mean().backward()
        layers.zero_grad()
    print(f"{method}: {peak_mib() - before:.0f} MiB above the {before:.0f} MiB before the first step")
    if session is not None:
        session.close()


if __name__ == "__main__":
    if sys.argv[1:] not in ([one] for one in METHODS):
        sys.exit(f"name a method: {', '.join(METHODS)}")
    main(sys.argv[1])
