"""Makes parts of a model segments: by the model's own checkpointing, or by the classes of its layers."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import nn

from backhaul._session import Session
from backhaul._torch_api.wrap import unwrap

Layers = type[nn.Module] | tuple[type[nn.Module], ...]
_ENABLE = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
_DISABLE = ("activation_checkpointing_disable", "gradient_checkpointing_disable")
"""Methods of models of Transformers, each under its present name and the one before Transformers 5.23."""


def switch_on(model: Any, undo: ExitStack) -> None:
    """Switches on the checkpointing of a model of Transformers, or of such models inside of another one.

    Args:
        model: The model. If its checkpointing is on, it stays as it is.
        undo: Receives what restores the model.

    Raises:
        ValueError: The model has no checkpointing of its own, or does not support it.
    """
    models = _with_checkpointing(model)
    if not models:
        raise ValueError(
            f"{type(model).__name__} has no activation checkpointing of its own. Name the classes of the modules to "
            "checkpoint, as in layers=Block"
        )
    for inner, enable in models:
        if not _is_checkpointing(inner):
            enable({"use_reentrant": False})
            if disable := _first(inner, _DISABLE):
                undo.callback(disable)


def make_segments(
    model: Any,
    session: Session,
    layers: Layers | None,
    undo: ExitStack,
    switch_on: Callable[[Any, ExitStack], None] = switch_on,
) -> None:
    """Makes a model call torch's checkpoint, or wraps the layers that the user named.

    Args:
        model: The model, or for models with checkpointing of their own a module that has some inside.
        session: The session of wrapped layers. Calls of torch's checkpoint must be redirected to it by the caller.
        layers: Classes of the modules to wrap; None for a model with checkpointing of its own.
        undo: Receives what restores the model.
        switch_on: Switches the model's own checkpointing on.

    Raises:
        ValueError: The model has neither layers of these classes nor checkpointing of its own.
    """
    if layers is None:
        switch_on(model, undo)
    else:
        session.wrap(model, layers)
        undo.callback(unwrap, model)


def _with_checkpointing(model: Any) -> list[tuple[Any, Callable[..., Any]]]:
    """Returns the outermost modules that can switch their checkpointing on, each with the method that does it."""
    enable = _first(model, _ENABLE)
    if enable is not None:
        return [(model, enable)]
    return [inner for child in model.children() for inner in _with_checkpointing(child)]


def _is_checkpointing(model: Any) -> bool:
    """Whether the checkpointing of a model is switched on, under its present or its older name."""
    present = "is_activation_checkpointing"
    return bool(getattr(model, present if hasattr(model, present) else "is_gradient_checkpointing", False))


def _first(model: Any, names: tuple[str, ...]) -> Callable[..., Any] | None:
    """Returns the first method of these names that the model has."""
    return next((method for name in names if callable(method := getattr(model, name, None))), None)
