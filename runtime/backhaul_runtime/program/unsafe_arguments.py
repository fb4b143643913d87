"""Detects values for which an op of the list crashes the process, reads or writes out of bounds, or never ends.

Torch's kernels check most of their arguments. This module covers the cases that were found where a kernel does not: the
program is refused before the op runs. Such values need not be an attack: a run that diverges has NaN in its grids. The
cases of ops on sequences and of fake quantization are in modules of their own.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from backhaul_runtime.program import unsafe_quantization, unsafe_sequences
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
        defaults = {argument.name: argument.default_value for argument in arguments_of(op)}
        given = dict(zip(defaults, args, strict=False))
        check({**defaults, **given, **kwargs})


def checks_values(name: str) -> bool:
    """Whether an op takes values that have to be checked directly before it runs."""
    return name in _CHECKS


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


def _weight_norm(given: Mapping[str, Any]) -> None:
    """The kernel divides by the number of directions, and reads the lengths past their end if there are fewer."""
    direction, length, dim = given["v"], given["g"], given.get("dim", 0)
    if not direction.dim() or dim not in (0, direction.dim() - 1):
        return
    if not direction.shape[dim]:
        raise ValueError("weight_norm has no directions")
    if length.numel() != direction.shape[dim]:
        raise ValueError(
            f"weight_norm has directions of shape {list(direction.shape)} and lengths of shape {list(length.shape)}"
        )


def _grid(given: Mapping[str, Any]) -> None:
    """The kernel converts NaN to an index that is out of bounds."""
    if bool(given["grid"].isnan().any()):
        raise ValueError("a sampling grid holds NaN, which is no position")


def _matrix_power(given: Mapping[str, Any]) -> None:
    """The least integer has no negative in 64 bits, so the kernel's loop never ends."""
    if given["n"] == -(1 << 63):
        raise ValueError("a matrix is raised to the least integer")


def _counts(given: Mapping[str, Any]) -> None:
    """For NaN as a count the kernel's loop never ends."""
    if bool(given["count"].isnan().any()):
        raise ValueError("a binomial draw has NaN as its count")


def _rates(given: Mapping[str, Any]) -> None:
    """On a GPU, a rate that is negative or NaN ends the process."""
    if not bool((given["self"] >= 0).all()):
        raise ValueError("a Poisson draw has a rate that is negative or NaN")


def _elementwise_out(given: Mapping[str, Any]) -> None:
    """The op enlarges a result tensor of another size, and nothing accounts for the memory."""
    operands = [given["self"], given["other"]]
    shapes = [value.shape if isinstance(value, torch.Tensor) else () for value in operands]
    shape = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
    if given["out"].shape != shape:
        raise ValueError(f"its out= is of size {list(given['out'].shape)}, its result of size {list(shape)}")


_CHECKS: Mapping[str, Callable[[Mapping[str, Any]], None]] = {
    **{
        f"aten.{op}.{kind}_mode": _division
        for op in ("div", "div_", "divide", "divide_")
        for kind in ("Tensor", "Scalar")
    },
    **{f"aten.grid_sampler{kind}.default": _grid for kind in ("", "_2d", "_3d")},
    **{f"aten.{op}.out": _elementwise_out for op in ("add", "sub", "mul", "div")},
    "aten._weight_norm.default": _weight_norm,
    **dict.fromkeys(("aten.linalg_matrix_power.default", "aten.matrix_power.default"), _matrix_power),
    "aten.binomial.default": _counts,
    "aten.poisson.default": _rates,
    **unsafe_quantization.CHECKS,
    **unsafe_sequences.CHECKS,
}
