"""Wraps modules in place so that they checkpoint themselves. Names and state_dict keys stay the same."""

from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from copy import deepcopy
from typing import Any, Self

from torch import nn

from backhaul._torch_api.fsdp import is_sharded
from backhaul._torch_api.inlining import is_inlined
from backhaul._torch_api.layer_groups import LayerGroup, run_layer
from backhaul_runtime.errors import SettingError
from backhaul_runtime.torch_internals.checkpoint_wrapper import CheckpointWrapper, inside_of
from backhaul_runtime.torch_internals.private import submodules_of


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
        """Runs the wrapped module as a segment, or as a part of one with the modules beside it.

        All arguments are passed to the module, whatever their names.
        """
        if is_inlined():
            return self._checkpoint_wrapped_module(*args, **kwargs)
        group = self.__dict__.get("_group")
        if group is None:
            return run_layer(self.checkpoint_fn, inside_of(self), args, kwargs)
        return group.call(self.__dict__["_position"], args, kwargs)

    def compile(self, *args: Any, backend: Any = "inductor", **options: Any) -> None:
        """Compiles the wrapped module, as `nn.Module.compile` does, so that its graphs are segments.

        Args:
            *args: Further arguments of torch.compile.
            backend: The backend. "inductor" without options or a mode stands for `backend="backhaul"` with Inductor's
                kernels, which workers compile too. Code of other backends than "backhaul" runs on the trainer only.
            **options: Further arguments of torch.compile.
        """
        if backend == "inductor" and not options.keys() & {"options", "mode"}:
            backend, options["options"] = "backhaul", {"kernels": "inductor"}
        inside_of(self).compile(*args, backend=backend, **options)

    def join(self, group: LayerGroup, position: int) -> None:
        """Makes this module a part of a segment of several layers."""
        self.__dict__.update(_group=group, _position=position)

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
        copied = type(self)(deepcopy(inside_of(self), memo), self.checkpoint_fn)
        if "_group" in self.__dict__:
            copied.join(deepcopy(self.__dict__["_group"], memo), self.__dict__["_position"])
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles as the wrapped module, so that a file can be loaded without Backhaul.

        Protocol 1 names the class in a form that pickle accepts although the wrapper has another class.
        """
        return inside_of(self).__reduce_ex__(1)


def wrap(
    model: nn.Module,
    layers: type[nn.Module] | tuple[type[nn.Module], ...],
    checkpoint: Callable[..., Any],
    *,
    segment_layers: int = 1,
    kept_layers: int = 0,
) -> nn.Module:
    """Makes each module of the given classes inside the model a checkpointed segment, in place.

    Args:
        model: The model to change. A model that is itself of one of the classes cannot be replaced: wrap a parent.
        layers: Classes of the modules to checkpoint. Modules inside a wrapped module are not wrapped.
        checkpoint: Runs each module as a segment.
        segment_layers: Number of modules with the same parent that form one segment if each takes what the one before
            returns, see NOTE [Layer groups].
        kept_layers: Number of the last modules that are not checkpointed.

    Raises:
        ValueError: The model has no module of these classes.
        SettingError: An argument has an invalid value.
    """
    _check_arguments(model, layers, segment_layers, kept_layers)
    matching = list(_matching(model, layers))
    if not matching:
        raise ValueError(f"{type(model).__name__} has no unwrapped module of {layers} inside")
    modules = list(dict.fromkeys(child for _, _, child in matching))  # one that occurs several times gets one wrapper
    if kept_layers > len(modules):
        raise SettingError(
            f"kept_layers={kept_layers} is more than the {len(modules)} modules of {layers} in {type(model).__name__}. "
            "A plan fits only the model that it was made for: write one for this model with `backhaul plan`"
        )
    wrappers = {module: SegmentModule(module, checkpoint) for module in modules[: len(modules) - kept_layers]}
    for parent, name, child in matching:
        if child in wrappers:
            submodules_of(parent)[name] = wrappers[child]
    if segment_layers > 1:
        for siblings in _siblings(matching, wrappers):
            for first in range(0, len(siblings), segment_layers):
                group = LayerGroup(siblings[first : first + segment_layers], checkpoint)
                for position, module in enumerate(group.layers):
                    wrappers[module].join(group, position)
    return model


def _check_arguments(model: object, layers: Any, segment_layers: object, kept_layers: object) -> None:
    """Raises SettingError for arguments of `wrap` that are of a wrong type or too small."""
    if not isinstance(model, nn.Module):
        raise SettingError(f"wrap got a {type(model).__name__} as the model, which must be a module")
    try:
        isinstance(None, layers)  # looks at all classes of a tuple
    except TypeError:
        raise SettingError(f"layers={layers!r} must be a class of modules, or a tuple of classes") from None
    for name, value, least in (("segment_layers", segment_layers, 1), ("kept_layers", kept_layers, 0)):
        if not isinstance(value, int) or value < least:
            raise SettingError(f"{name}={value!r} must be a whole number of at least {least}")


def _matching(
    parent: nn.Module, layers: type[nn.Module] | tuple[type[nn.Module], ...]
) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Yields each module to checkpoint with its parent and its name there."""
    for name, child in submodules_of(parent).items():
        if isinstance(child, layers):
            yield parent, name, child
        elif child is not None and not isinstance(child, SegmentModule):
            yield from _matching(child, layers)


def _siblings(
    matching: Sequence[tuple[nn.Module, str, nn.Module]], wrapped: Container[nn.Module]
) -> Iterator[list[nn.Module]]:
    """Yields the wrapped modules of each parent. Those that occur several times are left out."""
    occurrences = Counter(child for _, _, child in matching)
    by_parent: dict[nn.Module, list[nn.Module]] = {}
    for parent, _, child in matching:
        if child in wrapped and occurrences[child] == 1:
            by_parent.setdefault(parent, []).append(child)
    yield from by_parent.values()


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
