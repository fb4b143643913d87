"""Redirects torch's checkpoint while the forward of one model runs, for libraries that call it by name."""

from contextlib import ExitStack
from typing import Any, Self

import torch
from torch import nn

from backhaul._session import Session
from backhaul.integrations._first_pass import FirstPass


class RedirectedForward:
    """Hooks on a model that redirect the calls of torch's checkpoint which its forward makes.

    Whatever the library does to the model's checkpointing later, such as switching it off and on again, stays in force:
    the hooks only decide where torch's function leads. Copies of the model keep using the same session.

    Args:
        model: The model whose forward makes the calls.
        session: The session that they are redirected to.
        first_pass: The check after the first forward in training.
    """

    def __init__(self, model: nn.Module, session: Session, first_pass: FirstPass) -> None:
        self._session, self._first_pass = session, first_pass
        self._open: list[ExitStack] = []
        self._hooks = [
            model.register_forward_pre_hook(self._begin),
            model.register_forward_hook(self._end, always_call=True),
        ]

    def remove(self) -> None:
        """Removes the hooks, after which the model calls torch's own function again."""
        for hook in self._hooks:
            hook.remove()

    def _begin(self, model: nn.Module, args: Any) -> None:
        redirection = ExitStack()
        redirection.enter_context(self._session._redirecting())
        self._open.append(redirection)

    def _end(self, model: nn.Module, args: Any, output: Any) -> None:
        if self._open:
            self._open.pop().close()
        if output is not None and model.training and torch.is_grad_enabled():
            self._first_pass.ended()

    def __deepcopy__(self, memo: Any) -> Self:
        return self
