"""Reads autocast's cache, through which all uses of a weight share one cast.

NOTE [Casts]
1. Within an autocast region, torch casts a float32 leaf that requires gradients once, and every op that needs the cast
   gets the same tensor. Gradients of all uses are added in the cast's dtype, and their sum is cast back. A use outside
   a segment may share the cast with a use inside. So a segment's contributions go to the shared cast, not to the leaf.
2. The cache belongs to the process, and is cleared when a thread leaves its outermost region. torch has no function
   that reads it. But an op that autocast applies to gets its arguments from the cache, and a dispatch mode sees those
   arguments before the op runs. So this module calls an op under a mode that reads the arguments and does not run the
   op. If autocast begins to make a cast for the op, the mode raises an exception before anything is cached.
3. torch does not notice when a weight changes. If a training loop lies inside one region, the ops of later steps use a
   cast of the first step's weight, with or without checkpointing.
4. Nor does it notice when the dtype of autocast changes, as in a nested region: ops go on with the cast that there is,
   also after the nested region has ended. A replay has the same casts if they were made by ops of its own program.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from backhaul_runtime.torch_internals.ambient_state import cleared_casts
from backhaul_runtime.torch_internals.dispatch_mode import DispatchMode
from backhaul_runtime.torch_internals.private import (
    WeakTensorRef,
    identity_of,
    next_sequence_number,
    sequence_number,
    version_of,
)

STALE_CAST = "autocast's cache holds a cast of a weight from before the weight changed, or of another region's dtype"
"""The reason for a call that uses a cast which `CastWatch` has found."""

# Autocast applies to it on every device, and it takes three tensors, so one call looks three weights up.
_OP = torch.ops.aten.addmm.default
_ARITY = 3


_set_autocast_dtype = torch.set_autocast_dtype


class _Dtypes(threading.local):
    """The dtypes that autocast has had in the calling thread's outermost region, by type of device."""

    def __init__(self) -> None:
        self.seen: dict[str, set[torch.dtype]] = {}


_dtypes = _Dtypes()


def _set_and_note_dtype(device_type: str, dtype: torch.dtype) -> None:
    _set_autocast_dtype(device_type, dtype)
    if not _regions():  # a region is about to begin, or has ended
        _dtypes.seen.clear()
    _dtypes.seen.setdefault(device_type, set()).add(dtype)


# torch.autocast calls this when a region begins and ends. Without it, each use of a weight would have to look at the
# cache, which takes 40 microseconds for a weight without a cast.
torch.set_autocast_dtype = _set_and_note_dtype


class _NotCachedError(Exception):
    """Autocast would have to make a cast, so the cache does not hold one."""


class _Reader(DispatchMode):
    """Stores the arguments of `_OP` in `given` and does not run it. Any other op raises _NotCachedError (Rule 2)."""

    def __init__(self) -> None:
        super().__init__()
        self.given: tuple[Any, ...] = ()
        self._result = torch.empty(())

    def __torch_dispatch__(self, op: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op is not _OP:  # autocast begins to make a cast: running it would fill the cache
            raise _NotCachedError
        self.given = args
        return self._result


@contextmanager
def _region(device: str) -> Iterator[None]:
    """Switches autocast and its cache on, and restores both on exit. Unlike torch.autocast it keeps the cache."""
    before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device), torch.is_autocast_cache_enabled()
    _set(device, True, torch.bfloat16, True)
    try:
        yield
    finally:
        _set(device, *before)


def _set(device: str, is_enabled: bool, dtype: torch.dtype, caches: bool) -> None:
    torch.set_autocast_enabled(device, is_enabled)
    _set_autocast_dtype(device, dtype)
    torch.set_autocast_cache_enabled(caches)


@contextmanager
def _dispatching() -> Iterator[None]:
    """Makes dispatch modes work even where the caller has switched them off."""
    guard, key = torch._C._SetExcludeDispatchKeyGuard, torch._C.DispatchKey
    with guard(key.Python, False), guard(key.PythonTLSSnapshot, False):
        yield


def cached_casts(weights: Sequence[Tensor]) -> list[Tensor | None]:
    """Returns the cast of each weight that autocast's cache holds at present, None for a weight without one.

    Args:
        weights: Tensors on any devices. Neither the weights nor the cache are changed.
    """
    if not weights:
        return []
    casts: dict[int, Tensor] = {}
    with torch.no_grad(), torch._C.DisableTorchFunction(), _dispatching(), _Reader() as reader:
        for device in {weight.device for weight in weights}:
            here = [(index, weight) for index, weight in enumerate(weights) if weight.device == device]
            with _region(device.type):
                for start in range(0, len(here), _ARITY):
                    some = here[start : start + _ARITY]
                    if not _read(reader, some, casts):  # one has no cast, which hides the casts of the others
                        for one in some:
                            _read(reader, [one], casts)
    return [casts.get(index) for index in range(len(weights))]


def _read(reader: _Reader, weights: Sequence[tuple[int, Tensor]], casts: dict[int, Tensor]) -> bool:
    """Adds the casts of up to three weights to `casts`, by index. Returns False if the cache lacks one of them."""
    tensors = [weight for _, weight in weights]
    try:
        _OP(*tensors, *[tensors[0]] * (_ARITY - len(tensors)))
    except _NotCachedError:
        return False
    casts |= {index: cast for (index, weight), cast in zip(weights, reader.given, strict=False) if cast is not weight}
    return True


def has_cast_of_other_dtype(weight: Tensor, first_sequence: int) -> bool:
    """Whether autocast's cache holds a cast of a weight that a call found there, and of another dtype than now: Rule 4.

    Args:
        weight: The tensor that an op is about to use.
        first_sequence: The number of the first autograd node that the call could make.
    """
    device = weight.device.type
    if len(_dtypes.seen.get(device, ())) <= 1 or not torch.is_autocast_enabled(device):
        return False
    (cast,) = cached_casts([weight])
    if cast is None or cast.dtype is torch.get_autocast_dtype(device):
        return False
    return cast.grad_fn is None or sequence_number(cast.grad_fn) < first_sequence


class CastWatch:
    """Detects weights that changed after autocast had cast them (Rule 3). Any thread may use it."""

    def __init__(self) -> None:
        self._cleared = -1
        self._seen: dict[int, tuple[WeakTensorRef, int, object]] = {}

    def has_stale_cast(self, weight: Tensor, address: object) -> bool:
        """Whether autocast's cache holds a cast of a weight that differs from one made now.

        A cast differs if the weight has changed since, or if it was made under another dtype of autocast.
        On an accelerator only the version counter shows a change, because waiting for the address would stall forward.

        Args:
            weight: The tensor that an op is about to use.
            address: The address of the weight's present contents, or the deferred digest that will become it.
        """
        is_cast = weight.requires_grad and weight.is_leaf and weight.dtype is torch.float32
        if not is_cast or not torch.is_autocast_enabled(weight.device.type):
            return False
        if has_cast_of_other_dtype(weight, next_sequence_number()):
            return True
        cleared = cleared_casts()
        if self._cleared != cleared:
            self._cleared, self._seen = cleared, {}
        seen = self._seen.setdefault(identity_of(weight), (WeakTensorRef(weight), version_of(weight), address))
        _, version, before = seen
        is_known = isinstance(before, bytes) and isinstance(address, bytes)
        is_other = before != address if is_known else version != version_of(weight)
        return is_other and cached_casts([weight])[0] is not None


def in_region() -> bool:
    """Whether this thread is in an autocast region, also in one where autocast is off."""
    return _regions() > 0


def _regions() -> int:
    """Returns the number of autocast regions that this thread is in."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


CASTS = CastWatch()
"""The only instance of the process, because the cache belongs to the process too."""
