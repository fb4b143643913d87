"""Models of timm. See docs/integrations/timm.md."""

from typing import Any

from torch import nn

from backhaul._session import Session
from backhaul.integrations._first_pass import FirstPass, IfNothingTravels
from backhaul.integrations._sessions import session_of
from backhaul.integrations._within_forward import RedirectedForward

_TODO = "it called torch.utils.checkpoint.checkpoint nowhere. Call its train()."


def enable(
    model: nn.Module,
    worker: str | None = None,
    *,
    session: Session | None = None,
    if_nothing_travels: IfNothingTravels = "raise",
    **settings: Any,
) -> Session:
    """Lets workers recompute the blocks of a model, in place of `model.set_grad_checkpointing()`.

    Args:
        model: A model of timm, as `timm.create_model` returns it.
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
    switch: Any = getattr(model, "set_grad_checkpointing", None)
    try:
        if switch is None:
            raise AssertionError("it has no set_grad_checkpointing")
        switch(True)
    except AssertionError as error:  # timm asserts that a model supports it
        raise ValueError(f"{type(model).__name__} does not support checkpointing: {error}") from error
    session = session_of(session, worker, settings)
    RedirectedForward(model, session, FirstPass(session, type(model).__name__, if_nothing_travels, _TODO))
    return session
