"""Support for segments with FSDP2, `torch.distributed.fsdp.fully_shard`.

NOTE [Sharded]
1. A sharded module gathers its weights in a forward pre-hook and frees them in a forward hook. Its parameters, their
   storages and version counters stay the same objects: FSDP resizes a storage to zero, and other hooks resize it back
   for backward.
2. These hooks are not ops and cannot be recorded. If a sharded module is checkpointed, its hooks run around the
   segment, and only its `forward` is recorded. Libraries also checkpoint the bound method `module.__call__`, or that of
   a base class, which runs the same hooks.
3. The uploader's thread must not read memory that FSDP may free. It gets copies of the parameters that the worker
   lacks, made before the call ends. They count as bytes that wait to be sent, and are dropped once they are sent. A
   recomputation on the trainer reads the parameters themselves, which FSDP has gathered again by then.
4. A compiled graph reads parameters only while they are gathered: FSDP's hooks are not ops, so no graph contains one.
   So a call of a known program takes their digests and copies before it runs.
5. Only FSDP knows which parameters are sharded. While FSDP is in use, every parameter is treated as sharded.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed
from torch import Tensor, nn


def _class_of_fsdp(name: str) -> Any:
    """Returns a class of torch.distributed.fsdp; None if that is not imported."""
    return getattr(sys.modules.get("torch.distributed.fsdp"), name, None)


def is_sharded(module: object) -> bool:
    """Whether a module was passed to fully_shard."""
    kind = _class_of_fsdp("FSDPModule")
    return kind is not None and isinstance(module, kind)


def may_be_freed(tensor: Tensor) -> bool:
    """Whether a captured tensor's memory may be freed while the tensor lives (Rule 5)."""
    return isinstance(tensor, nn.Parameter) and frees_parameters()


def frees_parameters() -> bool:
    """Whether any parameter's memory may be freed at present, because FSDP is in use (Rule 5)."""
    kind = _class_of_fsdp("FSDPModule")
    return kind is not None and torch.distributed.is_initialized() and _has_modules(kind)


def _has_modules(kind: type) -> bool:
    """Whether any module was passed to fully_shard, which then creates a subclass of FSDPModule and its own class.

    torch itself has a subclass that is no class of modules, which torch.distributed.pipelining imports.
    """
    subclasses: list[type] = kind.__subclasses__()
    return any(issubclass(subclass, nn.Module) or _has_modules(subclass) for subclass in subclasses)


def reduces_in_backward(leaf: Tensor) -> bool:
    """Whether FSDP, of either version, may reduce the gradient of a leaf while backward runs."""
    flat = _class_of_fsdp("FlatParameter")
    return may_be_freed(leaf) or (flat is not None and isinstance(leaf, flat))


def call(
    checkpointed: Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any],
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Runs a function as a segment. Of a sharded module only `forward` becomes the segment (Rule 2).

    Args:
        checkpointed: Runs a function with these arguments as a segment.
        function: The function or module to checkpoint.
        args: Positional arguments for `function`.
        kwargs: Keyword arguments for `function`.
    """
    module: Any = function
    while isinstance(module, partial):
        module = module.func
    if getattr(module, "__func__", None) is nn.Module.__call__:
        module = module.__self__
    if not is_sharded(module):
        return checkpointed(function, args, kwargs)
    forward, attributes = module.forward, vars(module)
    before = attributes.get("forward", attributes)  # a default that no module has as an attribute

    def segment(*args: Any, **kwargs: Any) -> Any:
        return checkpointed(forward, args, kwargs)

    attributes["forward"] = segment
    try:
        return function(*args, **kwargs)
    finally:
        if before is attributes:
            del attributes["forward"]
        else:
            attributes["forward"] = before
