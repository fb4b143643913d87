"""Models of diffusers. See docs/integrations/diffusers.md."""

from typing import Any, Self

import torch
from torch import nn

from backhaul._session import Session
from backhaul.integrations._first_pass import FirstPass, IfNothingTravels
from backhaul.integrations._sessions import session_of

_TODO = "its checkpointing was never called. Call its train()."


def enable(
    model: Any,
    worker: str | None = None,
    *,
    session: Session | None = None,
    if_nothing_travels: IfNothingTravels = "raise",
    **settings: Any,
) -> Session:
    """Lets workers recompute the blocks of a model, in place of `model.enable_gradient_checkpointing()`.

    Args:
        model: A `ModelMixin` of diffusers that is trained, such as a U-Net or a transformer.
        worker: The address of a worker, or several; see `backhaul.connect`. None: starts one on this machine.
        session: The session to use instead of a new one.
        if_nothing_travels: What happens if the first forward shows that no segment can be recomputed by a worker:
            "raise" NotRemoteError, or "warn" with NotRemoteWarning.
        **settings: Further settings of `backhaul.connect`.

    Returns:
        The session, whose `report()` says what ran where. Close it after the training.

    Raises:
        ConnectError: No worker answers at one of the addresses.
        SettingError: There are settings for a new session besides a session.
        ValueError: The model does not support checkpointing.
    """
    session = session_of(session, worker, settings)
    model.enable_gradient_checkpointing(gradient_checkpointing_func=_Checkpoint(session))
    first_pass = FirstPass(session, type(model).__name__, if_nothing_travels, _TODO)

    def forward_ended(model: nn.Module, args: Any, output: Any) -> None:
        if model.training and torch.is_grad_enabled():
            first_pass.ended()
            hook.remove()

    hook = model.register_forward_hook(forward_ended)
    return session


class _Checkpoint:
    """Calls the checkpoint of a session. Copies of a model, such as an average of its weights, use the same session."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._session.checkpoint(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Self:
        return self
