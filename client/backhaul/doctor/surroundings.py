"""Looks at what advice depends on besides measured costs: the link to the host, and loaded libraries."""

from collections.abc import Iterator
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
    return Surroundings(fixed_bytes, rate, dict(_functions(torch.autograd.Function)))


def _host_bytes_per_s(device: torch.device) -> float:
    """Returns the rate of a copy from an accelerator to pinned memory of its host."""
    source = torch.empty(_COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty(_COPIED_BYTES, dtype=torch.uint8, pin_memory=True)
    durations_s = []
    for _ in range(_COPIES):
        torch.cuda.synchronize(device)
        began_s = perf_counter()
        target.copy_(source)
        torch.cuda.synchronize(device)
        durations_s.append(perf_counter() - began_s)
    return _COPIED_BYTES / min(durations_s)


def _functions(kind: type) -> Iterator[tuple[str, str]]:
    """Yields the name of each custom autograd function that is loaded, and its top-level package."""
    subclasses: list[type] = kind.__subclasses__()
    for one in subclasses:
        package = one.__module__.partition(".")[0]
        if package not in {"torch", "__main__", "builtins"}:
            yield one.__name__, package
        yield from _functions(one)
