"""Which device is measured, by the environment variable of the command's option. Free of torch."""

import os

VARIABLE = "BACKHAUL_BENCH_DEVICE"
""""cpu" or "cuda"; set for the process of each group."""
GROUPS = frozenset({"steps", "small_frozen", "small", "peak_flat", "peaks", "wire", "growth", "telemetry"})
"""What is measured on an accelerator too: the others have no work for one."""


def measured() -> str:
    """ "cpu" or "cuda"."""
    return os.environ.get(VARIABLE, "cpu")


def synchronize() -> None:
    """Returns when the device has done what it was given."""
    if measured() == "cuda":
        import torch

        torch.cuda.synchronize()
