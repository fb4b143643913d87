"""Joins several wrapped layers that follow each other into one segment, without a change of the model's forward.

NOTE [Layer groups]
1. In the first forward each layer is a segment of its own. A group of layers is joined from the second forward on, if
   each layer took the output of the one before as its first argument, and returned one tensor of the same kind.
2. A joined layer does not compute. It returns a `DeferredOutput`, which the next layer continues. The last layer of the
   group computes all of them as one segment, with the arguments that each of them got.
3. Whatever else uses a deferred output computes it first: the layers so far become a segment, and the layer after them
   begins another one. So the values are the same whatever the model does between layers. Only the order of random draws
   differs, if it draws between layers of a group.
4. A deferred output that a layer has continued has no value, because it only exists inside of the segment. Its use by
   anything else raises an error.
5. A layer runs under the settings of torch that were in force when the model called it, such as autocast and the mode
   of gradients, whatever they are when the value is needed. Calls under different settings are not joined.
6. What a layer has and gets must stay as it was until the layer runs. A change raises an error. A layer that sets
   attributes of its modules is not joined, because the model might read them before the layer has run.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from backhaul._torch_api.call_options import NAMES
from backhaul._torch_api.fsdp import is_sharded
from backhaul_runtime.torch_internals import ambient_state
from backhaul_runtime.torch_internals.private import pytree, version_of

_TAKEN = NAMES | {"function", "session"}
"""Keyword arguments that `checkpoint` would treat as options instead of passing them on."""
_METADATA = {
    Tensor.shape.__get__,  # type: ignore[attr-defined]
    Tensor.dtype.__get__,  # type: ignore[attr-defined]
    Tensor.device.__get__,
    Tensor.size,
    Tensor.dim,
}
"""What a deferred output has in common with the input of its group (Rule 1)."""


def run_layer(checkpoint: Callable[..., Any], layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs a layer as a segment. All arguments are passed to the layer, whatever their names."""
    taken = {name: kwargs.pop(name) for name in _TAKEN & kwargs.keys()}
    return checkpoint(partial(layer, **taken) if taken else layer, *args, **kwargs)


@dataclass(frozen=True, slots=True)
class _LayerCall:
    """A call of a layer without its first argument.

    Attributes:
        layer: The layer inside its wrapper.
        args: Positional arguments after the first one.
        kwargs: Keyword arguments of the layer.
        state: The settings of torch under which the model called the layer.
        given: What `_noted` returned when the model called the layer.
    """

    layer: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    state: ambient_state.State
    given: Sequence[tuple[int, int]]

    def check_unchanged(self) -> None:
        """Raises RuntimeError if anything is not what it was when the model called the layer (Rule 6)."""
        if _noted(self.layer, self.args, self.kwargs) != self.given:
            raise _changed(self.layer)


def _noted(layer: nn.Module, *arguments: Any) -> list[tuple[int, int]]:
    """Returns the identities and versions of the tensors that a layer has and gets, and modes of its modules."""
    tensors = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor)]
    tensors += [*layer.parameters(), *layer.buffers()]
    noted = [(id(tensor), 0 if isinstance(tensor, DeferredOutput) else version_of(tensor)) for tensor in tensors]
    return [*noted, *[(id(module), module.training) for module in layer.modules()]]


def _changed(layer: nn.Module) -> RuntimeError:
    return RuntimeError(
        f"something that a {type(layer).__name__} has or got was changed before the segment of several layers ran. "
        "Give each of these layers a segment of its own: set segment_layers=1"
    )


class LayerSegment:
    """Calls layers one after the other. The report and the prediction of calls take it for its first layer.

    Args:
        first: The first of the layers, after which the segment is named.
    """

    def __init__(self, first: nn.Module) -> None:
        self.__self__ = first

    def __call__(self, x: Tensor, layers: Sequence[nn.Module], arguments: Sequence[Any]) -> Tensor:
        """Returns the output of the last layer.

        Args:
            x: The input of the first layer.
            layers: The layers, each of which takes the output of the one before.
            arguments: The further arguments of each layer, positional ones and those with names.

        Raises:
            TypeError: A layer that returned a tensor in the first forward returns something else.
        """
        for layer, (args, kwargs) in zip(layers, arguments, strict=True):
            x = layer(x, *args, **kwargs)
            if not isinstance(x, Tensor):
                raise TypeError(
                    f"{type(layer).__name__} returned a {type(x).__name__}, but a tensor in the first forward. Give "
                    "each of these layers a segment of its own: set segment_layers=1"
                )
        return x


class DeferredOutput(Tensor):
    """The output of a layer that has not run yet. Its memory is that of the input and must not be read (Rule 3)."""

    _calls: tuple[_LayerCall, ...]
    _start: Tensor
    _start_version: int
    _group: "LayerGroup"
    _value: Tensor | None
    _is_continued: bool

    @classmethod
    def of(cls, group: "LayerGroup", start: Tensor, calls: tuple[_LayerCall, ...]) -> "DeferredOutput":
        """Returns the output of some calls, the first of which takes `start`."""
        output = start.detach().as_subclass(cls)
        output._group, output._start, output._calls = group, start, calls
        output._start_version = version_of(start)
        output._value, output._is_continued = None, False
        return output

    def is_open(self, group: "LayerGroup", state: ambient_state.State) -> bool:
        """Whether a layer of a group, called under these settings, may continue this output (Rules 3 to 5)."""
        is_unused = self._value is None and not self._is_continued
        return self._group is group and is_unused and self._calls[-1].state == state

    def continued(self, call: _LayerCall) -> "DeferredOutput":
        """Returns the output of a layer that takes this one."""
        self._is_continued = True
        output = DeferredOutput.of(self._group, self._start, (*self._calls, call))
        output._start_version = self._start_version
        return output

    def computed(self) -> Tensor:
        """Returns the value, and computes it first if nothing has.

        Raises:
            RuntimeError: The next layer has continued this output (Rule 4), or an argument has changed (Rule 6).
        """
        if self._value is None:
            if self._is_continued:
                raise RuntimeError(
                    f"the output of a {type(self._calls[-1].layer).__name__} inside a segment of several layers is "
                    "used outside of it. Give each of these layers a segment of its own: set segment_layers=1"
                )
            if version_of(self._start) != self._start_version:
                raise _changed(self._calls[0].layer)
            for call in self._calls:
                call.check_unchanged()
            with _under(self._calls[-1].state):
                self._value = self._group.compute(self._start, self._calls)
        return self._value

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Calls a function with the values of deferred arguments, unless it only asks for their kind."""
        if func in _METADATA:
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        args, kwargs = pytree.tree_map(_value_of, (args, kwargs or {}))
        return func(*args, **kwargs)


def _value_of(value: Any) -> Any:
    return value.computed() if isinstance(value, DeferredOutput) else value


@contextmanager
def _under(state: ambient_state.State) -> Iterator[None]:
    """Runs under the settings of torch with which the model called a layer (Rule 5)."""
    if state == ambient_state.capture() and not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), ambient_state.restored():
        ambient_state.apply(state, ambient_state.capture())
        yield


class LayerGroup:
    """Layers that are joined into one segment if they follow each other.

    Args:
        layers: The layers inside their wrappers, in the order of their calls.
        checkpoint: Runs a function as a segment.
    """

    def __init__(self, layers: Sequence[nn.Module], checkpoint: Callable[..., Any]) -> None:
        self.layers, self._checkpoint = list(layers), checkpoint
        self._is_joined: bool | None = None  # None until the first forward has ended
        self._is_chain, self._next = True, 0
        self._last: weakref.ref[Any] = weakref.ref(self)  # of the first forward, for Rule 1
        self._segments = {layer: LayerSegment(layer) for layer in self.layers}

    def call(self, position: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls the layer at a position, or defers it.

        Args:
            position: Position of the layer in the group.
            args: Positional arguments of the layer.
            kwargs: Keyword arguments of the layer.
        """
        layer, x = self.layers[position], args[0] if args else None
        may_join = self._is_joined and torch.is_grad_enabled() and not torch.compiler.is_compiling()
        if not may_join or is_sharded(layer) or not isinstance(x, Tensor):
            before = _attributes(layer) if self._is_joined is None else []
            result = run_layer(self._checkpoint, layer, tuple(map(_value_of, args)), kwargs)
            if self._is_joined is None and torch.is_grad_enabled():
                self._observe(position, x, result, sets_attributes=not _are_same(before, _attributes(layer)))
            return result
        state = ambient_state.capture()
        call = _LayerCall(layer, args[1:], kwargs, state, _noted(layer, args[1:], kwargs))
        if isinstance(x, DeferredOutput) and x.is_open(self, state):
            output = x.continued(call)
        else:
            output = DeferredOutput.of(self, _value_of(x), (call,))
        return output.computed() if position == len(self.layers) - 1 else output

    def compute(self, start: Tensor, calls: Sequence[_LayerCall]) -> Tensor:
        """Runs some of the layers as one segment.

        Args:
            start: The input of the first layer.
            calls: The calls of the layers.
        """
        arguments = [(call.args, dict(call.kwargs)) for call in calls]
        segment = self._segments[calls[0].layer]
        result: Tensor = self._checkpoint(segment, start, [call.layer for call in calls], arguments)
        return result

    def _observe(self, position: int, x: Any, result: Any, *, sets_attributes: bool) -> None:
        """Notes what a layer took and returned in the first forward (Rule 1), and what else it did (Rule 6)."""
        if position == 0:
            self._is_chain, self._next = True, 0
        is_first_or_next = position == 0 or (position == self._next and x is self._last())
        self._is_chain &= is_first_or_next and _are_alike(x, result) and not sets_attributes
        self._next = position + 1
        if isinstance(result, Tensor):
            self._last = weakref.ref(result)
        if position == len(self.layers) - 1:
            self._is_joined = self._is_chain

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = memo[id(self)] = type(self)([deepcopy(layer, memo) for layer in self.layers], self._checkpoint)
        return copied


def _attributes(layer: nn.Module) -> list[tuple[str, Any]]:
    """Returns the attributes of a layer's modules, without parameters and buffers."""
    return [item for module in layer.modules() for item in vars(module).items()]


def _are_same(before: Sequence[tuple[str, Any]], now: Sequence[tuple[str, Any]]) -> bool:
    return len(before) == len(now) and all(
        name == other and value is old for (name, value), (other, old) in zip(now, before, strict=True)
    )


def _are_alike(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return False
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
