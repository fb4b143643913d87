"""The options of a checkpointed call, which are separated from the function's own keyword arguments."""

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Self

import torch.utils.checkpoint
from torch.utils.checkpoint import noop_context_fn

from backhaul._config import CHECKS, DURABILITIES, GRAPHS, RETURNS, Config, Durability, GraphUse, Returns

DETERMINISM_CHECKS = ("default", "none", *CHECKS)
"""Torch has the first two of these, which here stand for the check of the session."""
TORCHS = frozenset(
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
NAMES = TORCHS | {"returns", "strict", "durability", "graphs"}
"""Keyword arguments that are options of `Session.checkpoint`. All others are passed to the function."""


def names_of_torch() -> frozenset[str]:
    """Returns the keyword arguments that the installed torch's checkpoint does not pass to the function."""
    new = "respect_saved_tensors_hooks"  # since torch 2.14
    has_new = new in inspect.signature(torch.utils.checkpoint.checkpoint).parameters
    return TORCHS if has_new else TORCHS - {new}


Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a call.

    Attributes:
        returns: What a worker returns: gradients or activations.
        strict: Raise an error instead of recomputing on the trainer.
        durability: What the trainer keeps in case a worker dies.
        use_reentrant: Follow the contract of torch's reentrant variant.
        preserve_rng_state: Reject a device whose generator could not be read before the call.
        contexts: Returns the contexts of the call and of its recomputation; None for none.
        checks_bytes: Compute digests of everything that a worker returns.
        compares_outputs: Compare only what calls of known programs return, not what autograd saves in them.
        debug: Note every op, for the message of a mismatch.
        early_stop: End a recomputation after the last saved tensor.
        respects_hooks: Pass what a policy keeps through the saved-tensor hooks around the call.
        graphs: Whether calls of captured graphs are recorded once, and whether Backhaul compiles functions itself.
    """

    returns: Returns = "auto"
    strict: bool = False
    durability: Durability = "lineage"
    use_reentrant: bool = False
    preserve_rng_state: bool = True
    contexts: Contexts | None = None
    checks_bytes: bool = False
    compares_outputs: bool = False
    debug: bool = False
    early_stop: bool = True
    respects_hooks: bool = True
    graphs: GraphUse = "auto"

    @property
    def may_be_known(self) -> bool:
        """Whether a call may run a program that is known from an earlier one: nothing has to see each op."""
        needs_ops = self.contexts is not None or self.debug or self.returns == "activations"
        return self.graphs != "off" and not needs_ops and not self.use_reentrant


def options_of(config: Config, kwargs: dict[str, Any], names: frozenset[str] = NAMES) -> tuple[Options, dict[str, Any]]:
    """Splits keyword arguments into the call's options and the function's own.

    Args:
        config: The settings of the session, used for options that are not given.
        kwargs: All keyword arguments of the call.
        names: Names of the options; all other keyword arguments belong to the function.

    Raises:
        ValueError: An option that torch rejects, with torch's message, or an unknown value.
    """
    # Code for torch's checkpoint may call a function whose own arguments are called `returns` or `strict`.
    given = {name: value for name, value in kwargs.items() if name in names}
    rest = {name: value for name, value in kwargs.items() if name not in names}
    use_reentrant = bool(given.get("use_reentrant"))
    context_fn = given.get("context_fn", noop_context_fn)
    debug = given.get("debug", False)
    determinism_check = given.get("determinism_check", "default")
    early_stop = given.get("early_stop", True)
    preserve_rng_state = given.get("preserve_rng_state", True)
    respects_hooks = given.get("respect_saved_tensors_hooks")
    returns = given.get("returns") or config.returns
    strict = given.get("strict")
    durability = given.get("durability") or config.durability
    graphs = given.get("graphs") or config.graphs
    has_contexts = context_fn is not noop_context_fn
    # Code that is written for torch's checkpoint relies on these errors and their messages.
    if use_reentrant and rest:
        raise ValueError("Unexpected keyword arguments: " + ",".join(rest))
    if use_reentrant and (has_contexts or debug):
        raise ValueError("Passing `context_fn` or `debug` is only supported when use_reentrant=False.")
    if use_reentrant and respects_hooks is not None:
        raise ValueError("Passing `respect_saved_tensors_hooks` is only supported when use_reentrant=False.")
    # A misspelt value would silently mean another one.
    if determinism_check not in DETERMINISM_CHECKS:
        raise ValueError(f"determinism_check should be one of {list(DETERMINISM_CHECKS)}, but got {determinism_check}")
    check = determinism_check if determinism_check in CHECKS else config.determinism_check
    if returns not in RETURNS:
        raise ValueError(f"returns={returns!r} is not one of {', '.join(map(repr, RETURNS))}")
    if graphs not in GRAPHS:
        raise ValueError(f"graphs={graphs!r} is not one of {', '.join(map(repr, GRAPHS))}")
    if durability not in DURABILITIES:
        raise ValueError(f"durability={durability!r} is not one of {', '.join(map(repr, DURABILITIES))}")
    # torch's two context managers set these globally, for calls that somebody else wrote. None: nobody has set them.
    settings = torch.utils.checkpoint
    if settings._checkpoint_debug_enabled is not None:
        debug = settings._checkpoint_debug_enabled and not use_reentrant  # the reentrant form refuses debug
    if settings._enable_checkpoint_early_stop is not None:
        early_stop = settings._enable_checkpoint_early_stop
    if debug and has_contexts:  # torch's own contexts for debug would take the place of the caller's
        raise ValueError("debug=True is incompatible with non-default context_fn")
    options = Options(
        returns=returns,
        strict=config.strict if strict is None else strict,  # a call may turn it off
        durability=durability,
        use_reentrant=use_reentrant,
        preserve_rng_state=preserve_rng_state,
        contexts=context_fn if has_contexts else None,
        checks_bytes=check == "bytes",
        compares_outputs=check == "outputs",
        debug=debug,
        early_stop=early_stop,
        respects_hooks=respects_hooks is not False,
        graphs=graphs,
    )
    return options, rest


def decorator(
    checkpoint: Callable[..., Any], args: tuple[Any, ...], rest: dict[str, Any], options: dict[str, Any]
) -> "Callable[[Callable[..., Any]], Decorated]":
    """Returns the decorator for `checkpoint(**options)` without a function. Raises ValueError for other arguments.

    Args:
        checkpoint: Runs a function as a segment.
        args: No positional arguments are allowed here.
        rest: Keyword arguments that are no options; none are allowed.
        options: The options for each call of the function.
    """
    if args or rest:
        raise ValueError("checkpoint() got arguments but no function: pass the function first")
    return lambda function: Decorated(function, checkpoint, options)


class Decorated:
    """A function whose calls are checkpointed segments. It keeps the name of the original function."""

    def __init__(self, function: Callable[..., Any], checkpoint: Callable[..., Any], options: dict[str, Any]) -> None:
        self._function = function
        self._checkpoint = checkpoint
        self._options = options
        functools.update_wrapper(self, function, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the function as a segment."""
        return self._checkpoint(self._function, *args, **self._options, **kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> "Self | Decorated":
        get = getattr(self._function, "__get__", None)
        bound = self._function if get is None else get(instance, owner)
        return self if bound is self._function else Decorated(bound, self._checkpoint, self._options)
