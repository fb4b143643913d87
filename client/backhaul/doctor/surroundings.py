"""Looks at what advice depends on besides measured costs: the link to the host."""

from time import perf_counter

import torch

from backhaul.doctor.advice import Surroundings

_COPIED_BYTES, _COPIES = 64 << 20, 3


def look(fixed_bytes: float, device: torch.device) -> Surroundings:
    """Returns the surroundings of a model.

    Args:
        fixed_bytes: Size of the parameters and of the optimizer's state, in bytes.
        device: The device of the model.
    """
    rate = _host_bytes_per_s(device) if device.type == "cuda" else 0.0
    return Surroundings(fixed_bytes, rate)


def _host_bytes_per_s(device: torch.device) -> float:
    """Returns the rate of a copy from an accelerator to pinned memory of its host."""
    src = torch.empty(_COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty(_COPIED_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
    durations_s = []
    # Only the times depend on the waits, so no simulated device can show that one of them is missing.
    for _ in range(_COPIES):
        torch.cuda.synchronize(device)
        began_s = perf_counter()
        target.copy_(src)
        torch.cuda.synchronize(device)
        durations_s.append(perf_counter() - began_s)
    return _COPIED_BYTES / min(durations_s)
