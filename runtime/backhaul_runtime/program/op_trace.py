"""Describes ops in readable lines, for the error that shows where two runs of a call differ."""

import sys
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from backhaul_runtime.torch_internals.private import OpOverload

_NOT_THE_CALLERS = (
    str(Path(__file__).parents[1]),
    str(Path(torch.__file__).parent),
    sysconfig.get_path("stdlib"),
)


def describe_op(op: OpOverload | str, args: tuple[Any, ...], kwargs: dict[str, Any], returned: Any) -> str:
    """Returns one line: the op, its arguments and results, and the line of the caller's code that called it."""
    given = [_shown(value) for value in args] + [f"{name}={_shown(value)}" for name, value in kwargs.items()]
    return f"{op}({', '.join(given)}) -> {_shown(returned)}{_place()}"


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_shown, value))}]"
    return repr(value)


def _place() -> str:
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_CALLERS):
        frame = frame.f_back
    return f"  at {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
