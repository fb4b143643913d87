"""Moves a generator as a call would move it, without the rest of the call.

What an op draws must follow from the layouts of its inputs alone. On a CPU the op itself runs again, on inputs of these
layouts without contents. On a CUDA device the generator counts what was drawn, so the count is added.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from backhaul_runtime.errors import Refusal
from backhaul_runtime.tensors.layout import layout_of
from backhaul_runtime.torch_internals.dispatch_mode import DispatchMode
from backhaul_runtime.torch_internals.generators import default_generator, restoring
from backhaul_runtime.torch_internals.private import DisableTorchDispatch, OpOverload, pytree

BY_LAYOUT = frozenset(
    {
        "bernoulli",
        "bernoulli_",
        "cauchy_",
        "exponential_",
        "geometric_",
        "log_normal_",
        "native_dropout",
        "normal",
        "normal_",
        "rand",
        "rand_like",
        "randint",
        "randint_like",
        "randn",
        "randn_like",
        "random_",
        "randperm",
        "rrelu_with_noise",
        "uniform",
        "uniform_",
    }
)
"""The ops of which the number of draws follows from layouts. The others reject some draws, by value."""


class _Like:
    """Stands for a tensor of a layout."""

    def __init__(self, tensor: Tensor) -> None:
        self._layout, self._device = layout_of(tensor), tensor.device

    def make(self) -> Tensor:
        """Returns a tensor of the layout, whose contents mean nothing: zeros, which every op takes as a probability."""
        layout = self._layout
        made = torch.empty_strided(layout.shape, layout.strides, dtype=layout.dtype, device=self._device)
        return made.zero_()


class _DrawingOps(DispatchMode):
    """Notes the ops that move a generator."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self._generator = generator
        self.calls: list[tuple[Callable[..., Any], Any]] = []

    def __torch_dispatch__(self, op: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the op, and notes it if it draws."""
        before = self._generator.get_state()
        arguments = pytree.tree_map_only(Tensor, _Like, (tuple(args), kwargs or {}))
        result = op(*args, **(kwargs or {}))
        if not torch.equal(before, self._generator.get_state()):
            if op._opname not in BY_LAYOUT:
                raise Refusal(f"what {op} draws follows from values")
            self.calls.append((op, arguments))
        return result


def draws_of(run: Callable[[], object], device: torch.device) -> Callable[[], None]:
    """Runs a call, and returns a function that moves the default generator of a device as the call has done.

    All generators are afterwards as they were before.

    Args:
        run: Makes the call once. What it returns is dropped.
        device: The device of the generator.

    Raises:
        Refusal: How far the call moves the generator does not follow from layouts.
    """
    generator = default_generator(device)
    restore = restoring([generator])
    try:
        if device.type == "cuda":
            offset = generator.get_offset()
            run()
            drawn = generator.get_offset() - offset
            return lambda: _skip(default_generator(device), drawn)
        ops = _DrawingOps(generator)
        with ops:
            run()
        ended = generator.get_state()
        calls = ops.calls
        restore()
        _draw(calls)
        if not torch.equal(ended, generator.get_state()):
            raise Refusal("its draws alone move the generator otherwise than the whole call")
        return lambda: _draw(calls)
    finally:
        restore()


def _skip(generator: torch.Generator, drawn: int) -> None:
    generator.set_offset(generator.get_offset() + drawn)


def _draw(calls: Sequence[tuple[Callable[..., Any], Any]]) -> None:
    with torch.no_grad(), DisableTorchDispatch():  # dispatch modes of the caller must not see our own ops
        for op, arguments in calls:
            args, kwargs = pytree.tree_map_only(_Like, _Like.make, arguments)
            op(*args, **kwargs)
