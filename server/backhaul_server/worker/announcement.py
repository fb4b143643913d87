"""The line that a worker prints when it is ready."""

import torch

from backhaul_runtime.process.units import size_text
from backhaul_runtime.version import version


def announcement(address: str, device: torch.device, budget_bytes: int) -> str:
    """Returns the worker's first line on standard output. Its last word is the address, for programs that read it."""
    return (
        f"backhaul worker {version()} on {device}, torch {torch.__version__}, budget {size_text(budget_bytes)}, "
        f"listening on {address}"
    )
