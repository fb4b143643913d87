"""The options of a checkpointed call, told apart from the function's own keyword arguments."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import noop_context_fn

from backhaul._config import RETURNS, Config, Returns
from backhaul._report import Journal
from backhaul_runtime.errors import NotRemoteError

DETERMINISM_CHECKS = ("default", "none", "values", "bytes")


@dataclass(frozen=True, slots=True)
class Options:
    """How a call is treated.

    Attributes:
        returns: What comes back for it.
        strict: Raise rather than recompute on the trainer.
        torch_reason: Why torch's own checkpoint runs it on the trainer, empty where it does not.
        torch_options: What torch is given then.
    """

    returns: Returns = "auto"
    strict: bool = False
    torch_reason: str = ""
    torch_options: tuple[tuple[str, Any], ...] = ()


def options_of(config: Config, kwargs: dict[str, Any]) -> tuple[Options, dict[str, Any]]:
    """Splits keyword arguments into the call's options and the function's own.

    Raises:
        ValueError: For what torch refuses, in torch's words, and for unknown values.
    """
    rest = dict(kwargs)
    use_reentrant = rest.pop("use_reentrant", None)
    context_fn = rest.pop("context_fn", noop_context_fn)
    debug = rest.pop("debug", False)
    determinism_check = rest.pop("determinism_check", "values")
    early_stop = rest.pop("early_stop", True)
    preserve_rng_state = rest.pop("preserve_rng_state", True)
    returns = rest.pop("returns", None) or config.returns
    strict = rest.pop("strict", None)
    own_context = context_fn is not noop_context_fn
    if use_reentrant and rest:
        raise ValueError("Unexpected keyword arguments: " + ",".join(rest))
    if use_reentrant and (own_context or debug):
        raise ValueError("Passing `context_fn` or `debug` is only supported when use_reentrant=False.")
    if determinism_check not in DETERMINISM_CHECKS:
        raise ValueError(f"determinism_check should be one of {list(DETERMINISM_CHECKS)}, but got {determinism_check}")
    if debug and own_context:
        raise ValueError("debug=True is incompatible with non-default context_fn")
    if returns not in RETURNS:
        raise ValueError(f"returns={returns!r} is not one of {', '.join(map(repr, RETURNS))}")
    reason = "it brings a context_fn, which is code" if own_context else "debug=True traces it here" if debug else ""
    options = Options(
        returns=returns,
        strict=config.strict if strict is None else strict,
        torch_reason=reason,
        torch_options=(
            ("context_fn", context_fn),
            ("debug", debug),
            ("determinism_check", determinism_check if determinism_check in {"default", "none"} else "default"),
            ("early_stop", early_stop),
            ("preserve_rng_state", preserve_rng_state),
        ),
    )
    return options, rest


def run_in_torch(
    journal: Journal,
    name: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Options,
) -> Any:
    """Lets torch's own checkpoint run a call whose options only mean something on the trainer.

    Raises:
        NotRemoteError: Under `strict`.
    """
    if options.strict:
        raise NotRemoteError(
            f"segment {name} would be recomputed on the trainer: {options.torch_reason}. Leave that out, or drop "
            "strict=True",
            segment=name,
            reason=options.torch_reason,
        )
    log = journal.log(name)
    log.call()
    log.on_trainer(options.torch_reason)
    return torch_checkpoint(function, *args, use_reentrant=False, **dict(options.torch_options), **kwargs)
