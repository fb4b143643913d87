"""Redirects torch's checkpoint while the forward of one model runs, for libraries that call it by name."""

from contextlib import ExitStack
from typing import Any, Self

from torch import nn

from backhaul._session import Session


def redirect_forward(model: nn.Module, session: Session) -> None:
    """Redirects the calls of torch's checkpoint which the forward of a model makes, from now on.

    Whatever the library does to the model's checkpointing later, such as switching it off and on again, stays in force:
    hooks on the model only decide where torch's function leads. Copies of the model keep using the same session.

    Args:
        model: The model whose forward makes the calls.
        session: The session that they are redirected to.
    """
    redirection = _Redirection(session)
    model.register_forward_pre_hook(redirection.begin)
    model.register_forward_hook(redirection.end, always_call=True)


class _Redirection:
    def __init__(self, session: Session) -> None:
        self._session = session
        self._open: list[ExitStack] = []

    def begin(self, model: nn.Module, args: Any) -> None:
        opened = ExitStack()
        opened.enter_context(self._session._redirecting())
        self._open.append(opened)

    def end(self, model: nn.Module, args: Any, output: Any) -> None:
        if self._open:
            self._open.pop().close()

    def __deepcopy__(self, memo: Any) -> Self:
        return self
