"""Which device is measured, by the environment variable of the command's option. Free of torch."""

import os

VARIABLE = "BACKHAUL_BENCH_DEVICE"
"""Set for the process of each group, to "cpu" or "cuda"."""
GROUPS = frozenset({"steps", "small_frozen", "small", "peak_flat", "peaks", "wire", "growth", "telemetry"})
"""What is measured on an accelerator too: the others have no work for one."""


def measured() -> str:
    """The device's kind, "cpu" or "cuda"."""
    return os.environ.get(VARIABLE, "cpu")


def synchronize() -> None:
    """Returns when the device has done what it was given."""
    if measured() == "cuda":
        import torch

        torch.cuda.synchronize()
