"""torch_remat's functions, with workers that recompute: import this module in place of `torch_remat`.

    import backhaul.integrations.torch_remat as remat

    output = remat.checkpoint(region_name="layers.0")(block)(hidden_states)

`checkpoint` and `region` are replaced. Every other name is torch_remat's own. Outside a checkpoint of torch_remat,
`recompute_needs_tensor` does nothing and `is_recomputing` returns False. Both are right here, because Backhaul never
runs the function of a segment again.
"""

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, ParamSpec, TypeVar

import torch
import torch_remat
from torch import Tensor

from backhaul._api import current_session
from backhaul._torch_api.call_options import NAMES
from backhaul._torch_api.kept_regions import kept_region

_P = ParamSpec("_P")
_R = TypeVar("_R")
_TAKEN = NAMES | {"function"}
"""Keyword arguments that `Session.checkpoint` would treat as options instead of passing them on."""
Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


def checkpoint(
    *,
    region_name: str | None = None,
    determinism_check: str = "none",
    preserve_rng_state: bool = False,
    saved_tensors_hooks: Hooks | None = None,
    recompute_state_hooks: Sequence[Any] = (),
) -> Callable[[Callable[_P, Any]], Callable[_P, Any]]:
    """Returns a decorator whose functions are segments of the session that is current at each call.

    Use it as torch_remat's function of that name: `checkpoint(...)(function)(*args, **kwargs)`. A segment without kept
    regions may return gradients. With a kept region a worker returns the saved tensors outside of the region.

    Args:
        region_name: Label of the segment in torch_remat's own reports. Backhaul's reports name the function.
        determinism_check: As for `Session.checkpoint`. Values are compared in any case.
        preserve_rng_state: Accepted without effect: random numbers are always the same as in forward.
        saved_tensors_hooks: A pair of functions that pack and unpack the tensors that stay on the trainer.
        recompute_state_hooks: Accepted without effect: the function runs once, so no state has to be restored.

    Raises:
        SessionClosedError: Raised by the call of a decorated function: `backhaul.connect` was not called before.
    """

    def decorate(function: Callable[_P, Any]) -> Callable[_P, Any]:
        @functools.wraps(function, updated=())
        def checkpointed(*args: _P.args, **kwargs: _P.kwargs) -> Any:
            hooks = torch.autograd.graph.saved_tensors_hooks(*saved_tensors_hooks) if saved_tensors_hooks else None
            others: dict[str, Any] = dict(kwargs)
            taken = {name: others.pop(name) for name in _TAKEN & others.keys()}
            call = functools.partial(function, **taken) if taken else function
            with hooks or nullcontext():
                return current_session().checkpoint(call, *args, determinism_check=determinism_check, **others)

        return checkpointed

    return decorate


def region(function: Callable[_P, _R], name: str, *, recompute: bool) -> Callable[_P, _R]:
    """Returns the function as a region of a segment. Outside a segment it is an ordinary call.

    Args:
        function: The function or module to call.
        name: Label of the region in torch_remat's own reports.
        recompute: False to keep on the trainer what autograd saves inside the call; True to recompute it with the rest
            of the segment. Inside a kept region everything is kept.
    """

    @functools.wraps(function, updated=())
    def called(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if recompute or torch.compiler.is_compiling():
            return function(*args, **kwargs)
        with kept_region():
            return function(*args, **kwargs)

    return called


def __getattr__(name: str) -> Any:
    return getattr(torch_remat, name)


def __dir__() -> list[str]:
    return sorted({*dir(torch_remat), *globals()})
