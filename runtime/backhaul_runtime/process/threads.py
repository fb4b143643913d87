"""Checks that a function runs in the thread that it was written for."""

import threading
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def only_in(thread: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Declares the thread in which alone a function may run, and asserts it at each call, except under `python -O`.

    Args:
        thread: The name of the thread. Several threads may have it if they never share what the function changes.
    """

    def declared(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            running = threading.current_thread().name
            assert running == thread, f"{function.__qualname__} ran in the thread {running}, but is only for {thread}"
            return function(*args, **kwargs)

        return checked if __debug__ else function

    return declared
