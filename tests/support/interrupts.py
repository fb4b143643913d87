"""Interrupts a function at one of its lines, as Ctrl-C may."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def interrupted_at(number: int, function: Callable[[], object], counts: Callable[[FrameType], bool]) -> bool:
    """Calls a function, interrupted at the n-th line that counts. Returns whether it has so many.

    Args:
        number: The number of the line, from 0, in the order of execution.
        function: The function to call.
        counts: Whether the line that a frame is about to execute counts. Where a lock is taken or released, Python
            handles no signal, but tracing would interrupt it.
    """
    lines = iter(range(number + 1))

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line" and counts(frame) and next(lines, None) == number:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False
