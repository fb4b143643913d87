"""Accumulation blocks in a training loop that a library runs, so that no `with` statement can hold them.

NOTE [Blocks of a library's loop]
1. A block begins before the first forward of an optimizer step, in `begin`, and ends in `end`: after the last backward,
   and before the library clips gradients or steps the optimizer.
2. The library's own call of `loss.backward()` becomes a micro-batch of the block, inside `deferring`. So the library
   scales the loss as it always does.
3. If anything raises an error between the two, `abandon` must be called: an open block would add the gradients of the
   failed step to those of whatever calls `backward` next.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from backhaul._accumulate.block import AccumulationBlock
from backhaul._session import Session


class _AbandonedStepError(Exception):
    """Ends a block without its gradients. It never leaves this module."""


class OptimizerSteps:
    """The blocks of a training, of which at most one is open. Only the thread that trains may use it.

    Args:
        session: The session whose workers finish the backward passes.
        ends_in_closure: Whether `end` is called in the closure that the optimizer's step calls.
    """

    def __init__(self, session: Session, *, ends_in_closure: bool = False) -> None:
        self._session, self._ends_in_closure = session, ends_in_closure
        self._open: ExitStack | None = None
        self._block: AccumulationBlock | None = None

    @property
    def is_open(self) -> bool:
        """Whether the block of an optimizer step is open."""
        return self._open is not None

    def begin(self) -> None:
        """Opens the block of the next optimizer step. One that is still open ends first, with its gradients."""
        self.end()
        opened = ExitStack()
        self._block = opened.enter_context(self._session.accumulate())
        self._block.ends_in_closure = self._ends_in_closure
        self._open = opened

    def end(self) -> None:
        """Ends the open block, if there is one, which completes its gradients.

        Raises:
            AccumulationError: An error inside the block has left it incomplete, so its gradients are lost.
        """
        opened, self._open, self._block = self._open, None, None
        if opened is not None:
            opened.close()

    def abandon(self) -> None:
        """Ends the open block, if there is one, and drops its gradients."""
        opened, self._open, self._block = self._open, None, None
        if opened is not None:
            error = _AbandonedStepError()
            opened.__exit__(type(error), error, None)

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Runs a micro-batch in the open block, as `AccumulationBlock.run` does."""
        assert self._block is not None
        return self._block.run(function, *args)

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """Defers each `loss.backward()` inside, while a block is open."""
        if self._block is None:
            yield
        else:
            with self._block.deferring():
                yield
