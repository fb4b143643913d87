"""Models of timm. See docs/integrations/timm.md."""

from contextlib import ExitStack
from typing import Any

from backhaul.integrations._enable import Models


def _switch_on(model: Any, undo: ExitStack) -> None:
    switch: Any = getattr(model, "set_grad_checkpointing", None)
    try:
        if switch is None:
            raise AssertionError("it has no set_grad_checkpointing")
        switch(True)
    except AssertionError as error:  # timm asserts that a model supports it
        raise ValueError(f"{type(model).__name__} does not support checkpointing: {error}") from error
    undo.callback(switch, False)


enable = Models("it called torch.utils.checkpoint.checkpoint nowhere. Call its train().", _switch_on).enable
