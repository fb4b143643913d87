"""Wraps modules in place so that they checkpoint themselves. Names and state_dict keys stay the same."""

from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from typing import Any, Self

from torch import nn

from backhaul._torch_api.fsdp import is_sharded
from backhaul._torch_api.options import NAMES
from backhaul_runtime.torch_internals.checkpoint_wrapper import CheckpointWrapper, inside_of
from backhaul_runtime.torch_internals.private import submodules_of

_TAKEN = NAMES | {"function", "session"}
"""Keyword arguments that `checkpoint` would treat as options instead of passing them on."""


class SegmentModule(CheckpointWrapper):
    """A module whose forward is a checkpointed segment.

    It is a subclass of torch's CheckpointWrapper, so that other libraries recognise it. Names of parameters, buffers
    and modules, keys of state_dict, copies and saved files are those of the wrapped module.

    Args:
        module: The wrapped module, which has the parameters.
        checkpoint: Runs the module as a segment.
    """

    def __init__(self, module: nn.Module, checkpoint: Callable[..., Any]) -> None:
        super().__init__(module, checkpoint_fn=checkpoint)
        self.__dict__["_is_complete"] = True  # attributes set from now on are set by the user

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the wrapped module as a segment. All arguments are passed to the module, whatever their names."""
        checkpoint: Callable[..., Any] = self.checkpoint_fn
        inside = inside_of(self)
        taken = {name: kwargs.pop(name) for name in _TAKEN & kwargs.keys()}
        return checkpoint(partial(inside, **taken) if taken else inside, *args, **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute of the wrapped module, whose forward reads it, unless it is one of the wrapper itself.

        fully_shard sets `__class__` of the module that it gets.
        """
        if "_is_complete" not in self.__dict__ or name in {*self.__dict__, *submodules_of(self), "__class__"}:
            super().__setattr__(name, value)
        else:
            setattr(inside_of(self), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(inside_of(self), name)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yields this module, and the modules inside under the same names: the wrapper adds no level."""
        memo = set() if memo is None else memo
        if self not in memo:
            if remove_duplicate:
                memo.add(self)
            yield prefix, self
            yield from inside_of(self).named_modules(memo, prefix, remove_duplicate)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """Yields the direct submodules of the wrapped module, among which `parallelize_module` looks for names."""
        return inside_of(self).named_children()

    def children(self) -> Iterator[nn.Module]:
        """Yields the wrapped module: `apply`, `to` and `train` reach its own parameters and state through it."""
        yield inside_of(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self)(deepcopy(inside_of(self), memo), self.checkpoint_fn)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles as the wrapped module, so that a file can be loaded without Backhaul.

        Protocol 1 names the class in a form that pickle accepts although the wrapper has another class.
        """
        return inside_of(self).__reduce_ex__(1)


def wrap(
    model: nn.Module, layers: type[nn.Module] | tuple[type[nn.Module], ...], checkpoint: Callable[..., Any]
) -> nn.Module:
    """Makes each module of the given classes inside the model a checkpointed segment, in place.

    Args:
        model: The model to change. A model that is itself of one of the classes cannot be replaced: wrap a parent.
        layers: Classes of the modules to checkpoint. Modules inside a wrapped module are not wrapped.
        checkpoint: Runs each module as a segment.

    Raises:
        ValueError: The model has no module of these classes.
    """
    wrappers: dict[nn.Module, SegmentModule] = {}  # a module that occurs several times gets one wrapper

    def visit(parent: nn.Module) -> None:
        for name, child in submodules_of(parent).items():
            if isinstance(child, layers):
                submodules_of(parent)[name] = wrappers.setdefault(child, SegmentModule(child, checkpoint))
            elif child is not None and not isinstance(child, SegmentModule):
                visit(child)

    visit(model)
    if not wrappers:
        raise ValueError(f"{type(model).__name__} has no unwrapped module of {layers} inside")
    return model


def unwrap(model: nn.Module) -> nn.Module:
    """Undoes `wrap`, in place, and returns the model.

    Raises:
        ValueError: A wrapped module was passed to fully_shard, which relies on hooks of the wrapper.
    """
    wrapped = [
        (parent, f"{prefix}.{name}".lstrip("."), name, child)
        for prefix, parent in model.named_modules()
        for name, child in submodules_of(parent).items()
        if isinstance(child, SegmentModule)
    ]
    for _, path, _, child in wrapped:
        if is_sharded(child):
            raise ValueError(f"{path} was sharded after wrap(): call unwrap() before fully_shard()")
    for parent, _, name, child in wrapped:
        submodules_of(parent)[name] = inside_of(child)
    return model
