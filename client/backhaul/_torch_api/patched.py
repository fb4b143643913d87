"""Redirects torch.utils.checkpoint.checkpoint temporarily, for code that cannot be edited.

NOTE [Redirection]
1. Callers keep torch's function in many places: as a global of any name, in a `functools.partial` on each layer
   (Transformers), as the default of a parameter (Diffusers), in a closure. Replacing a name would miss most of them, so
   the code object of the function is exchanged. This redirects every caller, and code that takes the function inside a
   block has torch's own function after the block.
2. torch.compile recognises the function and makes the checkpoint a part of its graph, which recomputes it. During
   tracing it calls the function with fake tensors. These calls run torch's own code.
3. Blocks nest, and the innermost one decides. All threads are redirected, because they share torch's function.
"""

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch.utils.checkpoint

from backhaul._observe.warnings import warn_not_remote
from backhaul_runtime.errors import NotRemoteError

_UNREACHED = (
    "nothing called torch.utils.checkpoint.checkpoint inside patched(), so nothing was sent to a worker. Call the "
    "model's gradient_checkpointing_enable(), or whatever switches its checkpointing on, and train() instead of "
    "eval(). Functions that torch.compile or torch's decorator processed before the block, and libraries with their "
    "own checkpointing, cannot be redirected: use session.wrap(model, layers=...) for these"
)


@contextmanager
def patched(checkpoint: Callable[..., Any], *, strict: bool = False) -> Iterator[None]:
    """Redirects calls of torch's function to another one.

    Leaving the block normally without any redirected call issues a warning.

    Args:
        checkpoint: Takes the arguments of torch's function.
        strict: Raise an error instead of issuing the warning.

    Raises:
        NotRemoteError: Under `strict`, if no call was redirected.
        RuntimeError: Another library has replaced torch's function by an object whose code cannot be exchanged.
    """
    with redirect(checkpoint) as block:
        yield
    if not block.is_reached:
        if strict:
            raise NotRemoteError(_UNREACHED, reason="nothing called torch.utils.checkpoint.checkpoint")
        warn_not_remote(_UNREACHED)


@contextmanager
def redirect(checkpoint: Callable[..., Any]) -> "Iterator[Redirect]":
    """Does what `patched` does, without a warning or an error if no call was redirected.

    Args:
        checkpoint: Takes the arguments of torch's function.

    Raises:
        RuntimeError: Another library has replaced torch's function by an object whose code cannot be exchanged.
    """
    block = Redirect(checkpoint)
    _enter(block)
    try:
        yield block
    finally:
        _leave(block)


class Redirect:
    """A `with` block in which calls of torch's function are redirected.

    Args:
        checkpoint: Takes the arguments of torch's function.

    Attributes:
        is_reached: Whether a call was redirected while the block was open.
    """

    def __init__(self, checkpoint: Callable[..., Any]) -> None:
        self.checkpoint = checkpoint
        self.is_reached = False


class _Redirection:
    """The exchange of the code of torch's function, from construction until `end`.

    Attributes:
        own: A function with torch's own code.
    """

    def __init__(self) -> None:
        function = torch.utils.checkpoint.checkpoint
        innermost = inspect.unwrap(function)  # torch wraps it for torch.compile
        if not isinstance(innermost, FunctionType) or innermost.__code__.co_freevars:
            raise RuntimeError(
                f"torch.utils.checkpoint.checkpoint is {function!r}, which another library has installed, and cannot "
                "be redirected. Use session.wrap(model, layers=...) instead of patched()"
            )
        self._function, self._code = innermost, innermost.__code__
        self.own = FunctionType(self._code, innermost.__globals__, innermost.__name__, innermost.__defaults__)
        self.own.__kwdefaults__ = innermost.__kwdefaults__
        # torch.compile uses the signature to separate torch's options from the checkpointed function's arguments.
        innermost.__signature__ = inspect.signature(innermost)  # type: ignore[attr-defined]
        innermost.__code__ = _code_meanwhile.__code__

    def end(self) -> None:
        """Restores the code of the function."""
        self._function.__code__ = self._code
        del self._function.__signature__  # type: ignore[attr-defined]


_blocks: list[Redirect] = []
_redirection: _Redirection | None = None
_lock = threading.Lock()  # guards the stack of blocks and the exchange of the code


def _enter(block: Redirect) -> None:
    global _redirection
    with _lock:
        if not _blocks:
            _redirection = _Redirection()
        _blocks.append(block)


def _leave(block: Redirect) -> None:
    with _lock:
        _blocks.remove(block)
        if not _blocks and _redirection is not None:
            _redirection.end()


def _code_meanwhile(*args: Any, **kwargs: Any) -> Any:
    """The exchanged code. It runs with the globals of torch's module."""
    from backhaul._torch_api.patched import redirected

    return redirected(*args, **kwargs)


def redirected(*args: Any, **kwargs: Any) -> Any:
    """Handles a call of torch's function while a `patched` block is open in any thread."""
    blocks, redirection = list(_blocks), _redirection
    assert redirection is not None
    # Another thread may just have left the last block. See Rule 2 for calls that are traced.
    if not blocks or torch.compiler.is_compiling():
        return redirection.own(*args, **kwargs)
    for block in blocks:
        block.is_reached = True
    return blocks[-1].checkpoint(*args, **kwargs)
