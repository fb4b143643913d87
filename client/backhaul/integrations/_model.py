"""Makes parts of a model segments: by the model's own checkpointing, or by the classes of its layers."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import nn

from backhaul._session import Session
from backhaul._torch_api.wrap import unwrap

Layers = type[nn.Module] | tuple[type[nn.Module], ...]


def make_segments(model: Any, session: Session, layers: Layers | None, undo: ExitStack) -> None:
    """Makes a model call torch's checkpoint, or wraps the layers that the user named.

    Args:
        model: The model, or for models with checkpointing of their own a module that has some inside.
        session: The session of wrapped layers. Calls of torch's checkpoint must be redirected to it by the caller.
        layers: Classes of the modules to wrap; None for a model with checkpointing of its own.
        undo: Receives what restores the model.

    Raises:
        ValueError: The model has neither layers of these classes nor checkpointing of its own.
    """
    if layers is not None:
        session.wrap(model, layers)
        undo.callback(unwrap, model)
        return
    models = list(with_checkpointing(model))
    if not models:
        raise ValueError(
            f"{type(model).__name__} has no activation checkpointing of its own. Name the classes of the modules to "
            "checkpoint, as in layers=Block"
        )
    for inner in models:
        if not is_checkpointing(inner):
            switch_on(inner)
            undo.callback(_switch_off, inner)


def with_checkpointing(model: Any) -> list[Any]:
    """Returns the outermost modules that can switch their checkpointing on: models of Transformers, and like them."""
    if _first(model, "activation_checkpointing_enable", "gradient_checkpointing_enable") is not None:
        return [model]
    return [inner for child in model.children() for inner in with_checkpointing(child)]


def is_checkpointing(model: Any) -> bool:
    """Whether the checkpointing of a model is switched on, under its present or its older name."""
    present = "is_activation_checkpointing"
    return bool(getattr(model, present if hasattr(model, present) else "is_gradient_checkpointing", False))


def switch_on(model: Any) -> None:
    """Switches the checkpointing of a model on, under its present name or the one before Transformers 5.23.

    Raises:
        ValueError: The model does not support checkpointing.
    """
    enable = _first(model, "activation_checkpointing_enable", "gradient_checkpointing_enable")
    if enable is None:
        raise ValueError(f"{type(model).__name__} has no activation checkpointing of its own")
    enable({"use_reentrant": False})


def _switch_off(model: Any) -> None:
    disable = _first(model, "activation_checkpointing_disable", "gradient_checkpointing_disable")
    if disable is not None:
        disable()


def _first(model: Any, *names: str) -> Callable[..., Any] | None:
    """Returns the first method of these names that the model has."""
    return next((method for name in names if callable(method := getattr(model, name, None))), None)
