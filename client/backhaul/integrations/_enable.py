"""`enable`, which makes the layers of a model segments. The module of each library says how its models do that."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from backhaul._session import Session
from backhaul.integrations._first_pass import FirstPass, IfNothingTravels
from backhaul.integrations._model import Layers, make_segments, switch_on
from backhaul.integrations._sessions import session_of
from backhaul.integrations._within_forward import redirect_forward


@dataclass(frozen=True, slots=True)
class Models:
    """The models of a library.

    Attributes:
        todo: What the user should do if the first forward has checkpointed nothing, as a sentence.
        switch_on: Switches the checkpointing of a model on, and gives the stack what switches it off. Raises ValueError
            if the model does not support checkpointing.
        layers: Classes of the modules to checkpoint if the caller names none. None: models of the library checkpoint
            their own layers.
    """

    todo: str
    switch_on: Callable[[Any, ExitStack], None] = switch_on
    layers: Layers | None = None

    def enable(
        self,
        model: Any,
        worker: str | None = None,
        *,
        session: Session | None = None,
        layers: Layers | None = None,
        if_nothing_travels: IfNothingTravels = "raise",
        **arguments: Any,
    ) -> Session:
        """Lets workers recompute the layers of a model, in a training loop of your own.

        The model's own checkpointing is switched on, unless it is on, and the calls of torch's checkpoint that its
        forward makes become segments. A model without checkpointing of its own has its layers wrapped instead. Names of
        modules and keys of `state_dict` stay the same. After an error the model is as it was.

        Args:
            model: The model, an nn.Module.
            worker: The address of a worker, or several; see `backhaul.connect`. None: starts one on this machine.
            session: The session to use instead of a new one.
            layers: Classes of the modules to checkpoint instead of what the library checkpoints. None: the model's own
                checkpointing; for models of torchvision their residual blocks.
            if_nothing_travels: What happens if the first forward shows that no segment can be recomputed by a worker:
                "raise" NotRemoteError, or "warn" with NotRemoteWarning.
            **arguments: Further arguments of `backhaul.connect`.

        Returns:
            The session, whose `report()` says what ran where. Close it after the training.

        Raises:
            ConnectError: No worker answers at one of the addresses.
            SettingError: There are arguments for a new session besides a session.
            ValueError: The model does not support checkpointing, has no modules of these classes, or
                `if_nothing_travels` is neither of the two.
        """
        layers = layers or self.layers
        with ExitStack() as undo:
            used = session_of(session, worker, arguments)
            if session is None:
                undo.callback(used.close)
            first_pass = FirstPass(used, type(model).__name__, if_nothing_travels, self.todo)
            make_segments(model, used, layers, undo, self.switch_on)
            if layers is None:
                redirect_forward(model, used)
            first_pass.watch(model)
            undo.pop_all()
        return used
