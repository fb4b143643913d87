"""Models of diffusers. See docs/integrations/diffusers.md."""

from contextlib import ExitStack
from typing import Any

from backhaul.integrations._enable import Models


def _switch_on(model: Any, undo: ExitStack) -> None:
    model.enable_gradient_checkpointing()
    undo.callback(model.disable_gradient_checkpointing)


enable = Models("its checkpointing was never called. Call its train().", _switch_on).enable
