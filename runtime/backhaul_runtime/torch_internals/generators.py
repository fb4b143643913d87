"""Finds the generator that an op draws from, and reads the states of those outside torch."""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from backhaul_runtime.errors import Refusal


def drawing_device(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.device:
    """Returns the device on which an op draws: that of its first tensor, else its `device` argument, else the CPU."""
    device = next((value.device for value in args if isinstance(value, Tensor)), kwargs.get("device"))
    return torch.device(device or "cpu")


def default_generator(device: torch.device) -> torch.Generator:
    """Returns the generator that ops on this device draw from by default.

    Raises:
        Refusal: The device is neither a CPU nor a CUDA device.
    """
    if device.type == "cpu":
        return torch.default_generator
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.init()  # type: ignore[no-untyped-call]
        return torch.cuda.default_generators[index]
    raise Refusal(f"random numbers on {device.type}")


def generators_in_use() -> list[torch.Generator]:
    """Returns the default generators of the CPU and, if CUDA is in use, of all CUDA devices."""
    on_cuda = torch.cuda.default_generators if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    return [torch.default_generator, *on_cuda]


def restoring(generators: Iterable[torch.Generator]) -> Callable[[], None]:
    """Returns a function that gives generators the states that they have now."""
    states = [(generator, generator.get_state()) for generator in generators]

    def restore() -> None:
        for generator, state in states:
            generator.set_state(state)

    return restore


def states_outside_torch() -> list[Any]:
    """Returns the states of the generators of Python and NumPy, which compare equal if nothing has drawn from them."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    return [random.getstate(), kind, np.asarray(keys).tobytes(), *rest]
