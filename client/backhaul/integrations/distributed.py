"""Models for DistributedDataParallel and fully_shard. See docs/integrations/distributed.md."""

from typing import Any

from torch import nn

from backhaul._session import Session
from backhaul.integrations._enable import Models
from backhaul.integrations._first_pass import IfNothingTravels
from backhaul.integrations._model import Layers

_MODELS = Models("its forward called none of the wrapped modules.")


def wrap(
    model: nn.Module,
    layers: Layers,
    worker: str | None = None,
    *,
    session: Session | None = None,
    if_nothing_travels: IfNothingTravels = "raise",
    **arguments: Any,
) -> nn.Module:
    """Lets workers recompute layers of a model, in place. Call it on each rank, before DistributedDataParallel or FSDP.

    Names of parameters, buffers and modules, and keys of state_dict, stay the same.

    Args:
        model: The model of this rank.
        layers: Classes of the modules that become segments. Modules inside of them are not wrapped.
        worker: The address of a worker, or several; see `backhaul.connect`. None: those in BACKHAUL_WORKER, or a worker
            that this call starts on this machine.
        session: The session to use instead of a new one.
        if_nothing_travels: What happens if the first forward in training shows that no segment can be recomputed by a
            worker: "raise" NotRemoteError, or "warn" with NotRemoteWarning.
        **arguments: Further arguments of `backhaul.connect`.

    Returns:
        The same model. `backhaul.current_session()` is its session.

    Raises:
        ConnectError: No worker answers at one of the addresses.
        SettingError: There are arguments for a new session besides a session.
        ValueError: The model has no module of these classes, or `if_nothing_travels` is neither of the two.
    """
    _MODELS.enable(model, worker, session=session, layers=layers, if_nothing_travels=if_nothing_travels, **arguments)
    return model
