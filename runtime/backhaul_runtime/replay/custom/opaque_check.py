"""The part of the value check that covers custom autograd functions and ops of other libraries.

Saved-tensor hooks see what such a function saves with `save_for_backward`, but it may keep more: tensors, numbers and
objects that it sets as attributes of its context. A recorder and a replay therefore both compute one digest for each
such node, over its arguments, its results, and everything on the context. The digest counts as that of a saved tensor.
"""

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from backhaul_runtime.errors import Refusal
from backhaul_runtime.program.custom.adapters import TensorMemory, adapter_of, attribute_names, is_only_attributes
from backhaul_runtime.program.custom.class_names import is_foreign, name_of_class
from backhaul_runtime.program.custom.code_files import place_of, why_no_place
from backhaul_runtime.program.custom.code_identity import identity_of_class, lines_of_class
from backhaul_runtime.tensors.deferred_digest import DeferredDigest, Digest, digest_of, read
from backhaul_runtime.tensors.digest import saved_digest
from backhaul_runtime.tensors.layout import Layout, layout_of
from backhaul_runtime.torch_internals.pre_dispatch import BACKWARD_MODE
from backhaul_runtime.torch_internals.private import is_plain
from backhaul_runtime.torch_internals.storages import storage_key

MAX_VALUES = 20_000
"""The most values that one node's arguments, results and context may hold."""

CHECKED = Layout(torch.uint8, (0,), (1,))
"""The layout under which the digest of a node is listed among those of saved tensors."""

_CONSTANTS = (bool, int, float, complex, str, bytes, torch.dtype, torch.layout, torch.memory_format)
_NAMED = (type, ModuleType)
_TEXTS = (int, float, complex, str, bytes, bytearray)
_APART = frozenset({"needs_input_grad", BACKWARD_MODE})
_WITHOUT_VALUES = frozenset({"lock", "RLock", "Stream", "Event", "ProcessGroup"})
"""Names of classes of C and C++ whose objects hold nothing that a gradient could depend on."""


class OpaqueCheck:
    """Collects what one node reads, returns and keeps. Raises Refusal for what can't be compared.

    Args:
        take: Returns the digest of a tensor's contents.

    Attributes:
        tensors: The tensors that were met on contexts, each as often as something there refers to it.
        storages: Keys of the storages of all tensors that were met.
    """

    def __init__(self, take: Callable[[Tensor, Layout], Digest]) -> None:
        self._take = take
        self._texts: list[str] = []
        self._digests: list[Digest] = []
        self._inside: list[int] = []  # ids of the containers and objects that are being visited, from outside to inside
        self._met: dict[int, Any] = {}  # those that were visited, which are kept so that no id is used twice
        self._count = 0
        self.tensors: list[Tensor] = []
        self._is_context = False
        self.storages: set[int] = set()

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Adds the tensors among the arguments or results. Numbers and texts among them are part of the program."""
        for tensor in tensors:
            self._memory(tensor)

    def add_contexts(self, results: Sequence[Tensor]) -> None:
        """Adds the contexts of the custom autograd functions that returned these tensors, each once."""
        contexts: dict[int, Any] = {  # torch's stubs do not say that a BackwardCFunction is a Node
            id(node): node for result in results if isinstance(node := result.grad_fn, BackwardCFunction)
        }
        self._is_context = True
        for node in contexts.values():
            self.add_context(node)

    def add_context(self, node: Node) -> None:
        """Adds all that is on the context of a custom autograd function, but not what it saves for backward."""
        given: Any = node
        # The code of the backward of an op of a library is compared here, because a handshake names ops only.
        identity = identity_of_class(given._forward_cls) if is_foreign(given._forward_cls.__module__) else None
        if identity is not None and identity.obstacle:
            raise Refusal(f"an op of a library whose backward can't be compared: {identity.obstacle}")
        code = "" if identity is None else identity.digest()
        self._texts.append(f"{type(node).__name__} {given.needs_input_grad} {code}")
        self._visit({name: value for name, value in sorted(vars(given).items()) if name not in _APART})

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
        elif isinstance(value, torch.device):
            self._texts.append(value.type)
        elif isinstance(value, _NAMED):
            self._named(value)
        elif id(value) in self._inside:
            self._texts.append(f"inside {self._inside.index(id(value))}")
        else:
            self._contents(value)

    def _named(self, value: Any) -> None:
        """Adds the name of a class or a module."""
        self._texts.append(f"{getattr(value, '__module__', '')}:{getattr(value, '__qualname__', value.__name__)}")

    def _contents(self, value: Any) -> None:
        """Visits a container or an object, each time alike: where forward has one object, a replay may have two."""
        self._inside.append(id(value))
        with self._counting_once(value):
            if type(value) in (list, tuple, torch.Size):
                self._sequence(value)
            elif type(value) is dict:
                self._mapping(value)
            else:
                self._object(value)
        self._inside.pop()

    @contextmanager
    def _counting_once(self, holder: Any) -> Iterator[None]:
        """Lists the tensors that something refers to in `tensors`, unless it was visited before."""
        counts, self._is_context = self._is_context, self._is_context and id(holder) not in self._met
        self._met[id(holder)] = holder
        try:
            yield
        finally:
            self._is_context = counts

    def _sequence(self, value: Iterable[Any]) -> None:
        items = list(value)
        self._texts.append(f"[{len(items)}")
        for item in items:
            self._visit(item)

    def _mapping(self, value: dict[Any, Any]) -> None:
        self._texts.append(f"{{{len(value)}")
        for key, item in value.items():
            self._visit(key)
            self._visit(item)

    def _object(self, value: Any) -> None:
        self._texts += [name_of_class(type(value)), *lines_of_class(type(value), self._line_of)]
        adapter = adapter_of(type(value))
        if adapter is not None:
            self._visit(list(adapter.flatten(value)))
        elif not self._contents_of_builtin(value):
            if not is_only_attributes(type(value)):
                self._without_values(value)
            self._attributes(value)

    def _without_values(self, value: Any) -> None:
        """Raises Refusal for an object with contents that are no attributes."""
        cls = type(value)
        if not (is_foreign(cls.__module__) and cls.__name__ in _WITHOUT_VALUES):
            raise Refusal(
                f"a custom function keeps an object of type {name_of_class(cls)}, whose contents can't be compared"
            )

    def _attributes(self, value: Any) -> None:
        self._mapping({name: getattr(value, name) for name in attribute_names(value)})

    def _contents_of_builtin(self, value: Any) -> bool:  # noqa: PLR0912  one branch per kind of object
        """Adds the contents of an object of one of Python's or NumPy's classes, or returns False.

        Each kind is here because its attributes don't show its contents: they would show none, or an address.
        """
        is_exact = False  # an object of a subclass may have attributes, too
        match value:
            case FunctionType():
                self._function(value)
            case MethodType() | BuiltinFunctionType():
                self._sequence([value.__name__, value.__self__])
                self._visit(getattr(value, "__func__", None))
                is_exact = True
            case np.ndarray() | np.generic():
                if value.dtype.hasobject:  # its bytes are addresses
                    raise Refusal("a custom function keeps an array of objects, which can't be compared")
                self._sequence([str(value.dtype), list(value.shape), value.tobytes()])
                is_exact = isinstance(value, np.generic)
            case set() | frozenset():
                # Other objects have an order that follows from their addresses, which differ between two processes.
                if not all(item is None or type(item) in _CONSTANTS for item in value):
                    raise Refusal("a custom function keeps a set of objects, which can't be compared")
                self._texts += sorted(map(repr, value))
            case range() | slice():
                self._sequence([value.start, value.stop, value.step])
                is_exact = True
            case torch.Generator():
                self._visit(value.get_state().numpy().tobytes())
                is_exact = True
            case weakref.ref():
                counts, self._is_context = self._is_context, False  # it does not keep a tensor alive
                self._visit(value())
                self._is_context = counts
                is_exact = True
            case dict():
                self._mapping(value)
            case list() | tuple() | deque():
                self._sequence(value)
            # By the repr of the kind itself: that of a subclass may be the same for two values.
            case int() | float() | complex() | str() | bytes() | bytearray():
                self._texts.append(next(kind.__repr__(value) for kind in _TEXTS if isinstance(value, kind)))
            case _:
                return value is Ellipsis or value is NotImplemented
        if not is_exact:
            self._attributes(value)
        return True

    def _function(self, value: FunctionType) -> None:
        """Adds a function that was made in forward: its code, and what it has captured."""
        self._texts.append(self._line_of(value.__code__))
        self._sequence([value.__module__, value.__defaults__, value.__kwdefaults__])
        for cell in value.__closure__ or ():
            with self._counting_once(cell):
                try:
                    self._visit(cell.cell_contents)
                except ValueError:  # it is empty
                    self._texts.append("empty")

    def _line_of(self, code: CodeType) -> str:
        """Returns a text that is equal for equal code, also in another process."""
        if not (line := place_of(code)):
            raise Refusal(f"a custom function keeps an object whose code can't be compared: {why_no_place(code)}")
        return line

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
        self.storages.add(storage_key(tensor))
        self._texts.append(f"T{tensor.requires_grad}")
        self._digests.append(digest_of(saved_digest, layout, self._take(tensor, layout)))


def _joined(text: bytes, digests: Sequence[Digest]) -> bytes:
    return xxhash.xxh3_128_digest(b"".join(map(read, digests)) + text)
