"""The part of the value check that covers custom autograd functions and ops of other libraries.

Saved-tensor hooks see what such a function saves with `save_for_backward`, but it may keep more: tensors, numbers and
objects that it sets as attributes of its context. A recorder and a replay therefore both compute one digest for each
such node, over its arguments, its results, and everything on the context. The digest counts as that of a saved tensor.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from backhaul_runtime.errors import Refusal
from backhaul_runtime.program.adapters import TensorMemory, adapter_of
from backhaul_runtime.program.code_identity import identity_of_class, is_foreign, name_of_class
from backhaul_runtime.tensors.deferred_digest import DeferredDigest, Digest, digest_of, read
from backhaul_runtime.tensors.digest import saved_digest
from backhaul_runtime.tensors.layout import Layout, layout_of
from backhaul_runtime.torch_internals.private import is_plain

MAX_VALUES = 20_000
"""The most values that one node's arguments, results and context may hold."""

CHECKED = Layout(torch.uint8, (0,), (1,))
"""The layout under which the digest of a node is listed among those of saved tensors."""

_CONSTANTS = (bool, int, float, complex, str, bytes, torch.dtype, torch.layout, torch.memory_format)
_NAMED = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType)


class OpaqueCheck:
    """Collects what one node reads, returns and keeps. Raises Refusal for what can't be compared.

    Args:
        take: Returns the digest of a tensor's contents.

    Attributes:
        tensors: The tensors that were met on contexts, each as often as it was met.
    """

    def __init__(self, take: Callable[[Tensor, Layout], Digest]) -> None:
        self._take = take
        self._texts: list[str] = []
        self._digests: list[Digest] = []
        self._met: dict[int, tuple[int, Any]] = {}  # with the object, so that no id is used twice
        self._count = 0
        self.tensors: list[Tensor] = []
        self._is_context = False

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Adds the tensors among the arguments or results. Numbers and texts among them are part of the program."""
        for tensor in tensors:
            self._memory(tensor)

    def add_contexts(self, results: Sequence[Tensor]) -> None:
        """Adds the contexts of the custom autograd functions that returned these tensors, each once."""
        contexts = {id(node): node for result in results if isinstance(node := result.grad_fn, BackwardCFunction)}
        self._is_context = True
        for node in contexts.values():
            self._add_context(node)

    def _add_context(self, node: Node | None) -> None:
        given: Any = node
        # The code of the backward of an op of a library is compared here, because a handshake names ops only.
        code = identity_of_class(given._forward_cls).digest() if is_foreign(given._forward_cls.__module__) else ""
        self._texts.append(f"{type(node).__name__} {given.needs_input_grad} {code}")
        self._visit({name: value for name, value in sorted(vars(given).items()) if name != "needs_input_grad"})

    def digest(self) -> Digest:
        """Returns the digest of everything that was added."""
        text = "\n".join(self._texts).encode()
        if all(isinstance(digest, bytes) for digest in self._digests):
            return _joined(text, self._digests)
        return DeferredDigest(partial(_joined, text, self._digests))

    def _visit(self, value: Any) -> None:
        self._count += 1
        if self._count > MAX_VALUES:
            raise Refusal(f"a custom function whose context has more than {MAX_VALUES} values")
        if value is None or type(value) in _CONSTANTS:
            self._texts.append(repr(value))
        elif isinstance(value, Tensor):
            self._tensor(value)
        elif isinstance(value, TensorMemory):
            self._memory(value.tensor)
        elif isinstance(value, (list, tuple)) and adapter_of(type(value)) is None:
            self._texts.append(f"[{len(value)}")
            for item in value:
                self._visit(item)
        elif isinstance(value, dict):
            self._texts.append(f"{{{len(value)}")
            for key, item in value.items():
                self._visit(key)
                self._visit(item)
        elif isinstance(value, torch.device):
            self._texts.append(value.type)
        else:
            self._object(value)

    def _object(self, value: Any) -> None:
        if isinstance(value, _NAMED):
            self._texts.append(f"{getattr(value, '__module__', '')}:{getattr(value, '__qualname__', value.__name__)}")
            return
        if id(value) in self._met:  # perhaps inside itself
            self._texts.append(f"object {self._met[id(value)][0]}")
            return
        self._met[id(value)] = len(self._met), value
        self._texts.append(name_of_class(type(value)))
        adapter = adapter_of(type(value))
        if adapter is not None:
            self._visit(list(adapter.flatten(value)))
        elif hasattr(value, "__dict__"):
            self._visit(dict(sorted(vars(value).items())))

    def _tensor(self, tensor: Tensor) -> None:
        if self._is_context:
            self.tensors.append(tensor)
        if is_plain(type(tensor)):
            self._memory(tensor)
            return
        adapter = adapter_of(type(tensor))
        if adapter is None:
            raise Refusal(f"a custom function keeps a tensor subclass {type(tensor).__name__}, which has no adapter")
        self._object(tensor)

    def _memory(self, tensor: Tensor) -> None:
        layout = layout_of(tensor)
        self._texts.append(f"T{tensor.requires_grad}")
        self._digests.append(digest_of(saved_digest, layout, self._take(tensor, layout)))


def _joined(text: bytes, digests: Sequence[Digest]) -> bytes:
    return xxhash.xxh3_128_digest(b"".join(map(read, digests)) + text)
