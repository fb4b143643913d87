"""The options of a checkpointed call, told apart from the function's own keyword arguments."""

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Self

import torch.utils.checkpoint
from torch.utils.checkpoint import noop_context_fn

from backhaul._config import DURABILITIES, RETURNS, Config, Durability, Returns

DETERMINISM_CHECKS = ("default", "none", "values", "bytes")
_TORCHS_OF_ANY_VERSION = frozenset(
    {
        "use_reentrant",
        "preserve_rng_state",
        "context_fn",
        "determinism_check",
        "debug",
        "early_stop",
        "respect_saved_tensors_hooks",
    }
)
NAMES = _TORCHS_OF_ANY_VERSION | {"returns", "strict", "durability"}
"""Keyword arguments that `Session.checkpoint` takes as its own options; all others go to the function."""


def names_of_torch() -> frozenset[str]:
    """Keyword arguments that the installed torch's checkpoint does not pass on to the function."""
    new = "respect_saved_tensors_hooks"  # since torch 2.14
    has_new = new in inspect.signature(torch.utils.checkpoint.checkpoint).parameters
    return _TORCHS_OF_ANY_VERSION if has_new else _TORCHS_OF_ANY_VERSION - {new}


Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


@dataclass(frozen=True, slots=True)
class Options:
    """How a call is treated.

    Attributes:
        returns: What comes back for it.
        strict: Raise rather than recompute on the trainer.
        durability: What the trainer keeps in case a worker dies.
        use_reentrant: Keep the contract of torch's reentrant variant.
        preserve_rng_state: Refuse a device whose generator could not be looked at before the call.
        contexts: Gives the contexts for the call and for its recomputation; None for none.
        checks_bytes: Digest what comes back once more, here.
        debug: Note every op, for the error where a recomputation differs.
        early_stop: Recompute nothing after the last tensor that was saved.
        respects_hooks: What a policy keeps goes through the saved-tensor hooks around the call.
    """

    returns: Returns = "auto"
    strict: bool = False
    durability: Durability = "lineage"
    use_reentrant: bool = False
    preserve_rng_state: bool = True
    contexts: Contexts | None = None
    checks_bytes: bool = False
    debug: bool = False
    early_stop: bool = True
    respects_hooks: bool = True


def options_of(config: Config, kwargs: dict[str, Any], names: frozenset[str] = NAMES) -> tuple[Options, dict[str, Any]]:
    """Splits keyword arguments into the call's options and the function's own.

    Args:
        config: The session's settings, used for options that are not given.
        kwargs: All keyword arguments of the call.
        names: Names of the options; the other keyword arguments are the function's.

    Raises:
        ValueError: For what torch refuses, in torch's words, and for unknown values.
    """
    given = {name: value for name, value in kwargs.items() if name in names}
    rest = {name: value for name, value in kwargs.items() if name not in names}
    use_reentrant = bool(given.get("use_reentrant"))
    context_fn = given.get("context_fn", noop_context_fn)
    debug = given.get("debug", False)
    determinism_check = given.get("determinism_check", "values")
    early_stop = given.get("early_stop", True)
    preserve_rng_state = given.get("preserve_rng_state", True)
    respects_hooks = given.get("respect_saved_tensors_hooks")
    returns = given.get("returns") or config.returns
    strict = given.get("strict")
    durability = given.get("durability") or config.durability
    has_contexts = context_fn is not noop_context_fn
    if use_reentrant and rest:
        raise ValueError("Unexpected keyword arguments: " + ",".join(rest))
    if use_reentrant and (has_contexts or debug):
        raise ValueError("Passing `context_fn` or `debug` is only supported when use_reentrant=False.")
    if use_reentrant and respects_hooks is not None:
        raise ValueError("Passing `respect_saved_tensors_hooks` is only supported when use_reentrant=False.")
    if determinism_check not in DETERMINISM_CHECKS:
        raise ValueError(f"determinism_check should be one of {list(DETERMINISM_CHECKS)}, but got {determinism_check}")
    if returns not in RETURNS:
        raise ValueError(f"returns={returns!r} is not one of {', '.join(map(repr, RETURNS))}")
    if durability not in DURABILITIES:
        raise ValueError(f"durability={durability!r} is not one of {', '.join(map(repr, DURABILITIES))}")
    settings = torch.utils.checkpoint  # its two context managers set these for everybody
    if settings._checkpoint_debug_enabled is not None:
        debug = settings._checkpoint_debug_enabled and not use_reentrant
    if settings._enable_checkpoint_early_stop is not None:
        early_stop = settings._enable_checkpoint_early_stop
    if debug and has_contexts:
        raise ValueError("debug=True is incompatible with non-default context_fn")
    options = Options(
        returns=returns,
        strict=config.strict if strict is None else strict,
        durability=durability,
        use_reentrant=use_reentrant,
        preserve_rng_state=preserve_rng_state,
        contexts=context_fn if has_contexts else None,
        checks_bytes=determinism_check == "bytes",
        debug=debug,
        early_stop=early_stop,
        respects_hooks=respects_hooks is not False,
    )
    return options, rest


def decorator(
    checkpoint: Callable[..., Any], args: tuple[Any, ...], rest: dict[str, Any], options: dict[str, Any]
) -> "Callable[[Callable[..., Any]], Decorated]":
    """What `checkpoint(**options)` without a function returns. Raises ValueError where something else was given.

    Args:
        checkpoint: Runs a function as a segment.
        args: No positional arguments are allowed here.
        rest: Keyword arguments that are no options; none are meant.
        options: The options that each call of the function gets.
    """
    if args or rest:
        raise ValueError("checkpoint() was given arguments but no function: name it first")
    return lambda function: Decorated(function, checkpoint, options)


class Decorated:
    """A function each call of which is a checkpointed segment, under the function's own name."""

    def __init__(self, function: Callable[..., Any], checkpoint: Callable[..., Any], options: dict[str, Any]) -> None:
        self._function = function
        self._checkpoint = checkpoint
        self._options = options
        functools.update_wrapper(self, function, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs it as a segment."""
        return self._checkpoint(self._function, *args, **self._options, **kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> "Self | Decorated":
        get = getattr(self._function, "__get__", None)
        bound = self._function if get is None else get(instance, owner)
        return self if bound is self._function else Decorated(bound, self._checkpoint, self._options)
