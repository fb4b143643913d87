"""Models of Transformers: their layers become segments. See docs/integrations/transformers.md."""

from typing import Any

from transformers import PreTrainedModel

from backhaul._api import connect
from backhaul._session import Session
from backhaul.integrations._first_pass import FirstPass, IfNothingTravels
from backhaul.integrations._within_forward import RedirectedForward

_TODO = "it called torch.utils.checkpoint.checkpoint nowhere. Call its train() and activation_checkpointing_enable()."


def enable(
    model: PreTrainedModel,
    worker: str | None = None,
    *,
    session: Session | None = None,
    if_nothing_travels: IfNothingTravels = "raise",
    **settings: Any,
) -> Session:
    """Lets workers recompute the layers of a model, in a training loop of your own.

    Switches the model's checkpointing on, unless it is on. Call `activation_checkpointing_enable` before for other
    options of it, such as `every_n_layers`.

    Args:
        model: A model of Transformers.
        worker: The address of a worker, or several; see `backhaul.connect`. None: starts one on this machine.
        session: The session to use instead of a new one.
        if_nothing_travels: What happens if the first forward shows that no segment can be recomputed by a worker:
            "raise" NotRemoteError, or "warn" with NotRemoteWarning.
        **settings: Further settings of `backhaul.connect`.

    Returns:
        The session, whose `report()` says what ran where. Close it after the training.

    Raises:
        ConnectError: No worker answers at one of the addresses.
        ValueError: The model does not support checkpointing.
    """
    if session is None:
        session = connect(worker, **settings)
    if not is_checkpointing(model):
        switch_on(model)
    RedirectedForward(model, session, FirstPass(session, type(model).__name__, if_nothing_travels, _TODO))
    return session


def is_checkpointing(model: Any) -> bool:
    """Whether the checkpointing of a model is switched on, under its present or its older name."""
    return bool(
        getattr(model, "is_activation_checkpointing", None) or getattr(model, "is_gradient_checkpointing", None)
    )


def switch_on(model: Any) -> None:
    """Switches the checkpointing of a model on, under its present name, or the one before Transformers 5.23."""
    options = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(options)
    else:
        model.gradient_checkpointing_enable(options)
