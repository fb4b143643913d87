"""Tells whether only contexts of custom autograd functions refer to a tensor that was made inside a call.

Whatever else refers to such a tensor might run backward through the graph of the call's inside, so that graph must
stay. But a context belongs to that graph and dies with it. Python cannot list who refers to a tensor, so references are
counted.
"""

import sys
import weakref
from collections import Counter

import torch
from torch import Tensor

from backhaul_runtime.tensors.layout import unsupported_reason
from backhaul_runtime.torch_internals.private import base_of, identity_of, references_in_torch
from backhaul_runtime.torch_internals.storages import storage_key

_OF_THIS_TEST = 2  # references: of a variable, and of the argument of the call that counts them


class ContextTensors:
    """The tensors that contexts refer to. It keeps none of them alive. Not thread-safe."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self._tensors: dict[int, weakref.ref[Tensor]] = {}
        self._views: dict[int, set[int]] = {}  # of each base, whose Python object may be gone

    def add(self, tensor: Tensor) -> None:
        """Notes a reference from a context to a tensor, which then also keeps the tensor that it is a view of."""
        key, base = identity_of(tensor), base_of(tensor)
        self._counts[key] += 1
        self._tensors[key] = weakref.ref(tensor)
        if base is not None:
            self._views.setdefault(identity_of(base), set()).add(key)

    def storages(self) -> set[int]:
        """Returns the keys of the storages of the tensors that still exist."""
        alive = [tensor for known in self._tensors.values() if (tensor := known()) is not None]
        return {storage_key(tensor) for tensor in alive if unsupported_reason(tensor) is None}

    def is_only_holder(self, key: int) -> bool:
        """Whether all references to a tensor, given by its identity, come from contexts."""
        views = self._views.get(key, ())
        alive = [self._tensors[view]() for view in views]
        known = [view for view in alive if view is not None]
        tensor = self._tensors[key]() if key in self._tensors else base_of(known[0]) if known else None
        if tensor is None:
            return False
        expected = self._counts[key] + (_OF_A_BASE if known else _OF_THIS_TEST)
        return sys.getrefcount(tensor) == expected and references_in_torch(tensor) == 1 + len(known)


def _references_of_a_base() -> int:
    """Returns the references that `is_only_holder` counts for a base with a view, in this version of torch."""
    with torch.inference_mode(False), torch.enable_grad():
        view = torch.zeros(2, requires_grad=True).sin().view(2, 1)
    base = base_of(view)
    return sys.getrefcount(base)


_OF_A_BASE = _references_of_a_base()
