"""Finds the generator that an op draws from, and reads the states of those outside torch."""

import random
from collections.abc import Callable, Mapping, Sequence
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


def restoring_generators() -> Callable[[], None]:
    """Returns a function that gives the default generators of the CPU and of CUDA devices their present states."""
    on_cuda = torch.cuda.default_generators if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    states = [(generator, generator.get_state()) for generator in (torch.default_generator, *on_cuda)]

    def restore() -> None:
        for generator, state in states:
            generator.set_state(state)

    return restore


def states_outside_torch() -> list[Any]:
    """Returns the states of the generators of Python and NumPy, which compare equal if nothing has drawn from them."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    return [random.getstate(), kind, np.asarray(keys).tobytes(), *rest]
