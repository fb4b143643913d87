"""Detects values for which an op of the list crashes the process, reads or writes out of bounds, or never ends.

Torch's kernels check most of their arguments. This module covers the cases that were found where a kernel does not: the
program is refused before the op runs. Such values need not be an attack: a run that diverges has NaN in its grids.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from backhaul_runtime.torch_internals.private import OpOverload, arguments_of


def check_values(name: str, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raises ValueError for values that an op must not get. Called directly before the op runs.

    Args:
        name: The name of the op on the list.
        op: The op that is about to run.
        args: The positional arguments of the op.
        kwargs: The keyword arguments of the op.
    """
    check = _CHECKS.get(name)
    if check is not None:
        given = dict(zip((argument.name for argument in arguments_of(op)), args, strict=False))
        check({**given, **kwargs})


def _division(given: Mapping[str, Any]) -> None:
    """Truncating division of the least integer by -1 raises a CPU trap, which kills the process."""
    if given.get("rounding_mode") != "trunc":
        return
    dividend, divisor = (torch.as_tensor(given[name]) for name in ("self", "other"))
    kind = torch.result_type(dividend, divisor)
    if kind.is_floating_point or kind.is_complex or kind is torch.bool:
        return
    if bool((divisor == -1).any()) and bool((dividend == torch.iinfo(kind).min).any()):
        raise ValueError("the least integer is divided by -1")


def _lstm(given: Mapping[str, Any]) -> None:
    """The kernel reads and writes weights and states past their ends if their sizes do not fit the input."""
    data, states, parameters = given["input"], given["hx"], given["params"]
    biased, layers = given["has_biases"], given["num_layers"]
    directions = 2 if given["bidirectional"] else 1
    if data.dim() != 3 or len(states) != 2 or not 1 <= layers <= len(parameters):  # noqa: PLR2004  batch, time, width
        raise ValueError(
            f"an LSTM has an input of {data.dim()} dimensions (3 are needed), {len(states)} states (2 are needed) and "
            f"{layers} layers with {len(parameters)} parameters"
        )
    cell, output = states[1].shape[-1], states[0].shape[-1]
    batch = data.shape[0 if given["batch_first"] else 1]
    expected: list[tuple[int, ...]] = []
    for layer in range(layers):
        width = data.shape[-1] if layer == 0 else output * directions
        one = [(4 * cell, width), (4 * cell, output), *([(4 * cell,)] * 2 if biased else [])]
        expected += (one + ([(output, cell)] if output != cell else [])) * directions
    held = [(layers * directions, batch, size) for size in (output, cell)]
    shapes = [tuple(tensor.shape) for tensor in (*states, *parameters)]
    if shapes != [*held, *expected]:
        raise ValueError(f"an LSTM has states and weights of sizes {shapes}, it needs {[*held, *expected]}")


def _weight_norm(given: Mapping[str, Any]) -> None:
    """The kernel reads the lengths past their end if there are fewer of them than directions."""
    direction, length, dim = given["v"], given["g"], given.get("dim", 0)
    if dim in (0, direction.dim() - 1) and length.numel() != direction.shape[dim]:
        raise ValueError(
            f"weight_norm has directions of shape {list(direction.shape)} and lengths of shape {list(length.shape)}"
        )


def _embedding_bag(given: Mapping[str, Any]) -> None:
    """The kernel reads out of bounds for offsets that decrease."""
    offsets = given["offsets"]
    if bool((offsets[1:] < offsets[:-1]).any()):
        raise ValueError("the offsets of an embedding bag decrease, they must not")


def _grid(given: Mapping[str, Any]) -> None:
    """The kernel converts NaN to an index that is out of bounds."""
    if bool(given["grid"].isnan().any()):
        raise ValueError("a sampling grid holds NaN, which is no position")


def _matrix_power(given: Mapping[str, Any]) -> None:
    """The least integer has no negative in 64 bits, so the kernel's loop never ends."""
    if given["n"] == -(1 << 63):
        raise ValueError("a matrix is raised to the least integer")


_CHECKS: Mapping[str, Callable[[Mapping[str, Any]], None]] = {
    **{
        f"aten.{op}.{kind}_mode": _division
        for op in ("div", "div_", "divide", "divide_")
        for kind in ("Tensor", "Scalar")
    },
    **{f"aten.grid_sampler{kind}.default": _grid for kind in ("", "_2d", "_3d")},
    "aten.lstm.input": _lstm,
    "aten._weight_norm.default": _weight_norm,
    "aten.embedding_bag.padding_idx": _embedding_bag,
    "aten.linalg_matrix_power.default": _matrix_power,
}
