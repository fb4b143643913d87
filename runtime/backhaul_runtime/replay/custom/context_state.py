"""Notices that a custom backward has changed its context, which a later backward over the same graph would see.

The digest of a context before and after the backward covers what the value check covers, and also what a replay need
not share with forward, because here both are of the same objects: attributes and gradients of tensors, the bytes
between their elements, numbers in classes and modules, and whether a lock is taken.
"""

from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
from torch import Tensor
from torch.autograd.graph import Node

from backhaul_runtime.errors import Refusal, UnsupportedTensorError
from backhaul_runtime.program.custom.class_names import is_foreign
from backhaul_runtime.program.custom.code_identity import lines_of_class
from backhaul_runtime.program.custom.value_texts import constant_text
from backhaul_runtime.replay.custom.opaque_check import OpaqueCheck
from backhaul_runtime.tensors.deferred_digest import ContentDigests, Digest, read
from backhaul_runtime.tensors.layout import byte_view, layout_of, unsupported_reason
from backhaul_runtime.torch_internals.private import DisableTorchDispatch, DisableTorchFunction


def context_digest(node: Node) -> Digest | None:
    """Returns the digest of the state of a custom function's context; None if it can't be compared."""
    check = _ContextState(ContentDigests().take)
    try:
        with DisableTorchDispatch(), DisableTorchFunction():
            check.add_context(node)
    except (Refusal, UnsupportedTensorError):
        return None
    return check.digest()


def is_changed(before: Digest | None, after: Digest | None) -> bool:
    """Whether a context is another than before, or may be. Waits for an accelerator if a digest is still there."""
    return before is None or after is None or read(before) != read(after)


class _ContextState(OpaqueCheck):
    def _tensor(self, tensor: Tensor) -> None:
        super()._tensor(tensor)
        self._constants(vars(tensor))
        if tensor.is_leaf:  # torch warns about .grad of others
            self._constants({"grad": tensor.grad})

    def _memory(self, tensor: Tensor) -> None:
        super()._memory(tensor)
        layout = layout_of(tensor)
        if layout.payload_bytes < layout.span_bytes:
            start = tensor.storage_offset() * tensor.element_size()
            super()._memory(byte_view(tensor, int(start), layout.span_bytes))

    def _named(self, value: Any) -> None:
        super()._named(value)
        if isinstance(value, type):
            self._texts += lines_of_class(value, self._line_of)
        elif isinstance(value, ModuleType) and not is_foreign(value.__name__):
            self._constants(vars(value))

    def _line_of(self, code: CodeType) -> str:
        return str(id(code))  # before and after it is that of the same object

    def _function(self, value: FunctionType) -> None:
        super()._function(value)
        names = value.__globals__
        self._constants({name: names[name] for name in value.__code__.co_names if name in names})

    def _contents_of_builtin(self, value: Any) -> bool:
        if isinstance(value, np.ndarray):
            self._texts.append(str(value.flags.writeable))
            if isinstance(value.base, np.ndarray):  # it may have more elements
                self._visit(value.base)
        return super()._contents_of_builtin(value)

    def _without_values(self, value: Any) -> None:
        super()._without_values(value)
        if type(value).__name__ in _LOCKS:
            self._texts.append(repr(value))  # says whether it is locked

    def _constants(self, values: dict[str, Any]) -> None:
        """Adds the constants and tensors among values by name. Of others it adds which objects they are."""
        for name, value in values.items():
            if isinstance(value, Tensor) and unsupported_reason(value) is None:
                self._memory(value)
            self._texts.append(f"{name} = {constant_text(value) or id(value)}")


_LOCKS = frozenset({"lock", "RLock"})
