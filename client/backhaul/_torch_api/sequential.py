"""checkpoint_sequential: functions in a row, in checkpointed chunks."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from backhaul._torch_api.call_options import NAMES


def checkpoint_sequential(
    checkpoint: Callable[..., Any],
    functions: nn.Sequential | Sequence[Callable[..., Any]],
    segments: int,
    *inputs: Any,
    **kwargs: Any,
) -> Any:
    """Runs functions in a row; each chunk but the last is one checkpointed segment.

    Args:
        checkpoint: Runs a chunk as a segment.
        functions: An nn.Sequential, whose children are used, or a sequence of functions.
        segments: Number of chunks. Each has len(functions) // segments functions; the last one has the rest.
        *inputs: Arguments of the first function. If there are several, a returned tuple is unpacked for the next
            function.
        **kwargs: Options of `checkpoint`; functions get no keyword arguments.

    Raises:
        ValueError: There are more segments than functions or fewer than one, or a keyword argument is no option.
    """
    unexpected = [name for name in kwargs if name not in NAMES]
    if unexpected:
        raise ValueError("Unexpected keyword arguments: " + ",".join(unexpected))
    row = list(functions.children()) if isinstance(functions, nn.Sequential) else list(functions)
    if not 1 <= segments <= len(row):
        raise ValueError(f"segments={segments} must be between 1 and the number of functions, {len(row)}")
    size = len(row) // segments
    *bounds, last = range(0, size * segments, size)
    unpacks = len(inputs) > 1
    for start in bounds:
        returned = checkpoint(_chunk(row[start : start + size], unpacks), *inputs, **kwargs)
        inputs = returned if unpacks and isinstance(returned, tuple) else (returned,)
    return _chunk(row[last:], unpacks)(*inputs)


def _chunk(functions: Sequence[Callable[..., Any]], unpacks: bool) -> Callable[..., Any]:
    def chunk(*values: Any) -> Any:
        for function in functions:
            returned = function(*values)
            values = returned if unpacks and isinstance(returned, tuple) else (returned,)
        return returned

    return chunk
