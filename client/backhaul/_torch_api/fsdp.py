"""Support for segments with FSDP2, `torch.distributed.fsdp.fully_shard`.

NOTE [Sharded]
1. A sharded module gathers its weights in a forward pre-hook and frees them in a forward hook. Its parameters, their
   storages and version counters stay the same objects: FSDP resizes a storage to zero, and other hooks resize it back
   for backward.
2. These hooks are not ops and cannot be recorded. If a sharded module is checkpointed, its hooks run around the
   segment, and only its `forward` is recorded.
3. The uploader's thread must not read memory that FSDP may free. It gets copies of the parameters that the worker
   lacks, made before the call ends. They count as bytes that wait to be sent, and are dropped once they are sent. A
   recomputation on the trainer reads the parameters themselves, which FSDP has gathered again by then.
4. Only FSDP knows which parameters are sharded. While FSDP is in use, every parameter is treated as sharded.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed
from torch import Tensor, nn


def _sharded_class() -> Any:
    """Returns FSDPModule, the class of all sharded modules; None if torch.distributed.fsdp is not imported."""
    return getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)


def is_sharded(module: object) -> bool:
    """Whether a module was passed to fully_shard."""
    kind = _sharded_class()
    return kind is not None and isinstance(module, kind)


def may_be_freed(tensor: Tensor) -> bool:
    """Whether a captured tensor's memory may be freed while the tensor lives (Rule 4)."""
    kind = _sharded_class()
    # fully_shard creates a subclass for each class of modules, and needs a process group.
    return (
        kind is not None
        and isinstance(tensor, nn.Parameter)
        and torch.distributed.is_initialized()
        and bool(kind.__subclasses__())
    )


def call(
    run: Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any],
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Runs a function as a segment. Of a sharded module only `forward` becomes the segment (Rule 2).

    Args:
        run: Runs a function with these arguments as a segment.
        function: The function or module to checkpoint.
        args: Positional arguments for `function`.
        kwargs: Keyword arguments for `function`.
    """
    module: Any = function
    own_args, own_kwargs = args, kwargs
    while isinstance(module, partial):
        own_args, own_kwargs, module = (*module.args, *own_args), {**module.keywords, **own_kwargs}, module.func
    if not is_sharded(module):
        return run(function, args, kwargs)
    forward, attributes = module.forward, vars(module)
    before = attributes.get("forward", attributes)  # a default that no module has as an attribute

    def segment(*args: Any, **kwargs: Any) -> Any:
        return run(forward, args, kwargs)

    attributes["forward"] = segment
    try:
        return module(*own_args, **own_kwargs)
    finally:
        if before is attributes:
            del attributes["forward"]
        else:
            attributes["forward"] = before
