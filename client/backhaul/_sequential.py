"""checkpoint_sequential: a row of functions in checkpointed chunks."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn


def checkpoint_sequential(
    checkpoint: Callable[..., Any],
    functions: nn.Sequential | Sequence[Callable[..., Any]],
    segments: int,
    input: Any,
    **kwargs: Any,
) -> Any:
    """Runs functions in a row; each chunk but the last is one checkpointed segment.

    Args:
        checkpoint: Runs a chunk as a segment.
        functions: An nn.Sequential, whose children are taken, or a sequence of functions.
        segments: Number of chunks. Each has len(functions) // segments functions, the last takes the rest.
        input: Of the first function.
        **kwargs: As for `checkpoint`; the functions take none.

    Raises:
        ValueError: More segments than functions, or fewer than one.
    """
    row = list(functions.children()) if isinstance(functions, nn.Sequential) else list(functions)
    if not 1 <= segments <= len(row):
        raise ValueError(f"segments={segments} must be between 1 and the number of functions, {len(row)}")
    size = len(row) // segments
    *bounds, last = range(0, size * segments, size)
    for start in bounds:
        input = checkpoint(_chunk(row[start : start + size]), input, **kwargs)
    return _chunk(row[last:])(input)


def _chunk(functions: Sequence[Callable[..., Any]]) -> Callable[[Any], Any]:
    def chunk(value: Any) -> Any:
        for function in functions:
            value = function(value)
        return value

    return chunk
