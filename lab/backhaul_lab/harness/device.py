"""The device that is measured. An environment variable passes it to the process of each group. Imports no torch."""

import os

VARIABLE = "BACKHAUL_BENCH_DEVICE"
"""Environment variable with the device, "cpu" or "cuda"."""


def measured() -> str:
    """Returns the device that is measured, "cpu" or "cuda"."""
    return os.environ.get(VARIABLE, "cpu")


def synchronize() -> None:
    """Waits until the device has finished all queued work."""
    if measured() == "cuda":
        import torch

        torch.cuda.synchronize()


def make_deterministic() -> None:
    """Makes ops on CUDA give the same bits in each run, because the figures of training compare gradients bit by bit.

    Call it before CUDA is initialised. Workers get the setting with each program, and the variable from this process.
    """
    if measured() == "cuda":
        import torch

        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # it costs time
