"""A tensor whose value a worker has yet to return. It has no graph.

NOTE [Awaited tensors]
1. Its shape, dtype and device are known. A few ops on numbers give another awaited tensor; everything else that torch
   is asked to do with it waits for the value first.
2. With its value it becomes an ordinary tensor: the same object with another class, as torch's lazy parameters do it.
   At the end of a block all of them have theirs.
3. Before that its memory holds NaN where the dtype has one, for code that looks at memory without asking torch.
4. Tensors that share memory, as `detach` makes them, become ordinary together: what is then written to one of them
   is in all of them, and no value arrives later.
"""

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from backhaul_runtime.tensors.layout import Layout
from backhaul_runtime.torch_internals.private import DisableTorchFunction, pytree
from backhaul_runtime.torch_internals.storages import is_only_user

_KNOWN = {
    getattr(Tensor, name).__get__
    for name in ("shape", "dtype", "device", "requires_grad", "is_leaf", "grad_fn", "ndim", "layout", "is_cuda", "grad")
} | {
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.ndimension,
    Tensor.stride,
    Tensor.element_size,
    Tensor.is_floating_point,
    Tensor.is_complex,
    Tensor.get_device,
    Tensor.__hash__,
    Tensor.__len__,
}
"""What does not depend on the value."""

_DEFERRED = (
    {
        Tensor.clone,
        Tensor.float,
        Tensor.double,
        Tensor.neg,
        Tensor.__neg__,
        torch.neg,
    }
    | {getattr(owner, name) for name in ("add", "sub", "mul", "div", "true_divide") for owner in (Tensor, torch)}
    | {getattr(Tensor, f"__{prefix}{name}__") for name in ("add", "sub", "mul", "truediv") for prefix in ("", "r")}
)
"""What gives an awaited tensor again."""

_IN_PLACE = {Tensor.add_: torch.add, Tensor.sub_: torch.sub, Tensor.mul_: torch.mul, Tensor.div_: torch.div}
"""The same for what writes to an awaited tensor: a running sum of losses must not wait for each."""


_lock = threading.RLock()
"""Held while a tensor becomes ordinary, or its value is passed on: other threads may read losses."""


class Awaited:
    """The awaited tensors of a block. One thread opens and ends it, and any thread may read the tensors.

    Args:
        read: Called for each value that is read before the end of the block, so that somebody waits for it.
    """

    def __init__(self, read: Callable[[], None]) -> None:
        self._tensors: list[weakref.ref[AwaitedTensor]] = []
        self._read = read
        self._is_ending = False

    def add(self, tensor: "AwaitedTensor") -> None:
        """Notes a tensor that is to have its value when the block ends."""
        self._tensors.append(weakref.ref(tensor))

    def read(self) -> None:
        """Notes that a value is read now."""
        if not self._is_ending:
            self._read()

    def end(self) -> None:
        """Gives all tensors their values."""
        self._is_ending = True
        try:
            for reference in self._tensors:
                _settle(reference())
        finally:
            self._is_ending = False
        self._tensors.clear()


class _Value:
    """A value that is read once, when it is needed."""

    def __init__(self, read: Callable[[], Tensor]) -> None:
        self._read: Callable[[], Tensor] | None = read
        self._value: Tensor | None = None

    def get(self) -> Tensor:
        """Returns the value, perhaps after waiting. It must not be written to."""
        if self._read is not None:
            self._value, self._read = self._read(), None
        assert self._value is not None
        return self._value


class AwaitedTensor(Tensor):
    """See NOTE [Awaited tensors]. Make it by `awaited`."""

    _value: _Value
    _of: Awaited
    _aliases: "list[weakref.ref[AwaitedTensor]]"  # those that have its memory, with this one. They share the list

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs a function of torch, after waiting for values unless it needs none."""
        kwargs = kwargs or {}
        if func in _KNOWN:
            with DisableTorchFunction():
                return func(*args, **kwargs)
        with _lock:
            result = cls._without_waiting(func, args, kwargs)
            if result is None:
                for one in pytree.tree_leaves((args, kwargs)):
                    _settle(one)
        if result is not None:
            return result
        with DisableTorchFunction():
            return func(*args, **kwargs)

    @classmethod
    def _without_waiting(cls, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
        """Returns what a function of torch gives if it need not wait for values; else None."""
        tensors = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        of = next((one._of for one in tensors if isinstance(one, cls)), None)
        if of is None:  # another thread has made them ordinary meanwhile
            return None
        if func is Tensor.detach:
            return args[0]._detached()  # type: ignore[no-any-return]
        with DisableTorchFunction():
            has_graph = torch.is_grad_enabled() and any(one.requires_grad for one in tensors)
        if has_graph:
            return None
        if func in _DEFERRED and "out" not in kwargs:
            return _deferred(func, args, kwargs, of)
        if func in _IN_PLACE and _may_wait(args[0]):
            result = _deferred(_IN_PLACE[func], args, kwargs, of)
            if (result.shape, result.dtype) == (args[0].shape, args[0].dtype):
                return _waiting(args[0], result._value, of)
        return None

    def _detached(self) -> "AwaitedTensor":
        with DisableTorchFunction():
            tensor = _over(self.as_subclass(Tensor).detach(), self._value, self._of)
        self._aliases += tensor._aliases
        tensor._aliases = self._aliases
        return tensor


def _settle(tensor: object) -> None:
    """Waits for the value of an awaited tensor. Then it is an ordinary one, with all that share its memory (Rule 4)."""
    with _lock, DisableTorchFunction(), torch.no_grad():
        if not isinstance(tensor, AwaitedTensor):
            return
        tensor._of.read()
        tensor.copy_(tensor._value.get())
        for reference in tensor._aliases:
            if (one := reference()) is not None:
                del one._value, one._of, one._aliases
                one.__class__ = Tensor  # type: ignore[assignment]


def awaited(layout: Layout, device: torch.device, read: Callable[[], Tensor], of: Awaited) -> Tensor:
    """Returns a tensor whose value `read` waits for.

    Args:
        layout: Its sizes, strides and dtype.
        device: Where its memory is.
        read: Returns the value, without a graph. It is called once.
        of: The awaited tensors of the block.
    """
    memory = torch.empty_strided(layout.shape, layout.strides, dtype=layout.dtype, device=device)
    return _over(_without_value(memory), _Value(read), of)


def _without_value(memory: Tensor) -> Tensor:
    return memory.fill_(torch.nan) if memory.is_floating_point() or memory.is_complex() else memory


def _over(memory: Tensor, value: _Value, of: Awaited) -> AwaitedTensor:
    return _waiting(memory.as_subclass(AwaitedTensor), value, of)


def _waiting(tensor: Tensor, value: _Value, of: Awaited) -> AwaitedTensor:
    """Makes a tensor an awaited one, with another value if it is one already."""
    is_new = not isinstance(tensor, AwaitedTensor) or "_value" not in tensor.__dict__
    tensor.__class__ = AwaitedTensor
    assert isinstance(tensor, AwaitedTensor)
    tensor._value = value
    if is_new:
        tensor._of, tensor._aliases = of, [weakref.ref(tensor)]
        of.add(tensor)
    return tensor


def _may_wait(tensor: Tensor) -> bool:
    """Whether what is written to a tensor may come later: nobody else sees its memory."""
    with DisableTorchFunction():
        if isinstance(tensor, AwaitedTensor):
            return len(tensor._aliases) == 1
        return type(tensor) is Tensor and tensor.numel() == 1 and is_only_user(tensor) and not tensor.is_inference()


def _deferred(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], of: Awaited) -> AwaitedTensor:
    """Returns the awaited result of a function that writes to nothing.

    Ordinary tensors among its arguments are copied, because others may write to them.
    """
    with DisableTorchFunction(), torch.no_grad():
        like = func(*args, **kwargs)  # mostly of one element, so that this takes less than another way to its dtype
    given = pytree.tree_map_only(
        Tensor, lambda t: t._value if isinstance(t, AwaitedTensor) else t.detach().clone(), [tuple(args), dict(kwargs)]
    )

    def read() -> Tensor:
        final_args, final_kwargs = pytree.tree_map_only(_Value, _Value.get, given)
        with torch.no_grad():
            result: Tensor = func(*final_args, **final_kwargs)
        return result

    with torch.inference_mode(False):  # a tensor of that mode could get no value after it
        return _over(_without_value(torch.empty_like(like)), _Value(read), of)
