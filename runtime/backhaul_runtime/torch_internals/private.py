"""Torch's private names, under names of our own.

No module outside this folder uses a private name of torch, which a test checks. So a change in a new release of torch
is repaired here. Functions take and return live objects of torch; none of them copies tensor data. The recorder calls
some of them for each tensor of each op. Those are `attrgetter` or `methodcaller`, which run no Python code.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter, methodcaller
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _DisablePythonDispatcher as DisablePythonDispatcher
from torch._C import _DisableTorchDispatch as DisableTorchDispatch
from torch._C import _WeakTensorRef as WeakTensorRef  # type: ignore[attr-defined]
from torch._C._autograd import _get_sequence_nr as next_sequence_number
from torch._C._autograd import _top_saved_tensors_default_hooks as top_saved_tensor_hooks
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._ops import OpOverload
from torch.autograd import forward_ad
from torch.autograd.graph import Node
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

__all__ = [  # what is exported from torch; the functions below are exported as well
    "DisablePythonDispatcher",
    "DisableTorchDispatch",
    "OpOverload",
    "WeakTensorRef",
    "next_sequence_number",
    "pytree",
    "top_saved_tensor_hooks",
]

_VMAP = torch._C.DispatchKeySet(torch._C._dispatch_key_parse("VmapMode"))


def version_of(tensor: Tensor) -> int:
    """The version counter of a tensor, 0 for an inference tensor, which has none."""
    return 0 if tensor.is_inference() else tensor._version


identity_of: Callable[[Tensor], int] = attrgetter("_cdata")
"""Identifies the C++ tensor behind a Python object, for as long as the tensor lives."""


base_of: Callable[[Tensor], Tensor | None] = attrgetter("_base")
"""The tensor that a view is a view of; None for a tensor that is no differentiable view."""


is_differentiable_view: Callable[[Tensor], bool] = methodcaller("_is_view")
"""Whether autograd tracks the tensor as a view of another."""


def dispatch_kind(tensor: Tensor) -> int:
    """The dispatch keys of a tensor as a number: equal for tensors of equal device, lazy bits and kind."""
    kind: int = torch._C._dispatch_keys(tensor).raw_repr()
    return kind


is_memoryless_zero: Callable[[Tensor], bool] = methodcaller("_is_zerotensor")
"""Whether the tensor is a zero that autograd has made without memory."""


def is_functorch_wrapped(tensor: Tensor) -> bool:
    """Whether a transform of torch.func has wrapped the tensor."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def is_batched(tensor: Tensor) -> bool:
    """Whether the tensor stands for a batch: of torch.func's vmap, or of `is_grads_batched`."""
    return is_functorch_wrapped(tensor) or torch._C._functorch.is_legacy_batchedtensor(tensor)


def with_lazy_bits(tensor: Tensor, *, conjugate: bool, negative: bool) -> Tensor:
    """A view of a tensor whose values are to be read as conjugates, as negatives, or both."""
    if conjugate:
        tensor = torch._conj(tensor)
    return torch._neg_view(tensor) if negative else tensor


def alias_of(tensor: Tensor) -> Tensor:
    """A detached tensor with the memory and the version counter of another.

    Below autograd, `detach` alone gives a new counter.
    """
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


sequence_number: Callable[[Node], int] = methodcaller("_sequence_nr")
"""The place of a node in the order of its creation in its thread. Backward runs the latest first."""


def set_sequence_number(tensor: Tensor, number: int) -> None:
    """Gives the node that made a tensor another place in backward's order."""
    assert tensor.grad_fn is not None
    tensor.grad_fn._set_sequence_nr(number)  # type: ignore[attr-defined]


def is_node_of(node: Node, function: type[torch.autograd.Function]) -> bool:
    """Whether a node was made by an autograd.Function."""
    return type(node) is function._backward_cls


saved_alpha: Callable[[Any], Any] = attrgetter("_saved_alpha")
"""The `alpha` with which an addition or subtraction scaled its second operand."""


def saved_other(node: Any) -> Tensor | None:
    """The second operand that a node saved, None where hooks packed it.

    Asking for a packed one would run the hooks: those of a segment would recompute it.
    """
    saved = node._raw_saved_other
    value: Tensor | None = saved.data if getattr(saved, "unpack_hook", saved) is None else None
    return value


def has_accumulation_hooks(parameter: Tensor) -> bool:
    """Whether a hook sees the gradient of a leaf before or after it is added to `.grad`."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def is_plain_backward() -> bool:
    """Whether the backward pass that runs is one of `backward()` without `inputs`, which adds to all of `.grad`."""
    return bool(torch.autograd._is_checkpoint_valid())  # type: ignore[no-untyped-call]


def backward_task_id() -> int:
    """A number for the backward pass that runs in this thread, -1 outside one."""
    return torch._C._current_graph_task_id()


def backward_pass() -> tuple[Any, Any]:
    """The GraphExecGroup of this thread, or None, and what identifies the pass: the group or `backward_task_id()`."""
    group = torch._C._get_graph_exec_group()
    return group, backward_task_id() if group is None else group


def current_transforms_differentiate() -> bool | None:
    """Whether a transform of torch.func in force takes gradients. None: no transform is in force."""
    stack = torch._C._functorch.get_interpreter_stack()
    if not stack:
        return None
    return any(level.key() == torch._C._functorch.TransformType.Grad for level in stack)


def is_in_forward_mode() -> bool:
    """Whether forward-mode differentiation is on."""
    return forward_ad._current_level >= 0


@contextmanager
def outside_transforms() -> Iterator[None]:
    """Switches off the transforms of torch.func and the vmap of batched gradients, in which torch refuses to draw."""
    with torch._C._ExcludeDispatchKeyGuard(_VMAP), temporarily_clear_interpreter_stack():
        yield


def container_node(value: Any) -> Any:
    """How pytree takes a container apart and puts it together."""
    return pytree.SUPPORTED_NODES[pytree._get_node_type(value)]


def is_selective_pair(first: Any, second: Any) -> bool:
    """Whether two contexts were made by torch's `create_selective_checkpoint_contexts`."""
    return type(first) is _CachingTorchDispatchMode and type(second) is _CachedTorchDispatchMode


submodules_of: Callable[[nn.Module], dict[str, nn.Module | None]] = attrgetter("_modules")
"""The modules directly inside a module by name, as a dict whose changes change the module."""


arguments_of: Callable[[OpOverload], Any] = attrgetter("_schema.arguments")
"""The arguments of an op's schema, in order."""


op_name: Callable[[OpOverload], str] = attrgetter("_schema.name")
"""The name of an op with its namespace and without its overload, as in "aten::add"."""


returns_of: Callable[[OpOverload], Any] = attrgetter("_schema.returns")
"""What an op's schema says that it returns, in order."""


def without_dynamo(function: Any) -> Any:
    """A function that torch.compile does not trace: its graph breaks around each call."""
    from torch import _dynamo

    return _dynamo.disable(function)  # type: ignore[no-untyped-call]


def cudnn_version() -> str:
    """The version of cuDNN that torch was built with."""
    return str(torch._C._cudnn.getCompileVersion())
