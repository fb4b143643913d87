"""Gives public names to the private functions and attributes of torch that Backhaul uses.

No module outside this folder uses a private name of torch, which a test checks. So when a release of torch changes one,
only this folder has to change. The functions take and return torch's own objects, and none copies tensor data. Those
that the recorder calls for every tensor of every op are `attrgetter` or `methodcaller`, which run no Python code.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from operator import attrgetter, methodcaller
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _DisablePythonDispatcher as DisablePythonDispatcher
from torch._C import _DisableTorchDispatch as DisableTorchDispatch
from torch._C import _WeakTensorRef as WeakTensorRef  # type: ignore[attr-defined]
from torch._C._autograd import _get_sequence_nr as next_sequence_number
from torch._C._autograd import _pop_saved_tensors_default_hooks as pop_saved_tensor_hooks
from torch._C._autograd import _push_saved_tensors_default_hooks as push_saved_tensor_hooks
from torch._C._autograd import _top_saved_tensors_default_hooks as top_saved_tensor_hooks
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._ops import HigherOrderOperator, OpOverload
from torch.autograd import forward_ad
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

__all__ = [  # names re-exported from torch; the functions below are public as well
    "DisablePythonDispatcher",
    "DisableTorchDispatch",
    "HigherOrderOperator",
    "OpOverload",
    "WeakTensorRef",
    "next_sequence_number",
    "pop_saved_tensor_hooks",
    "push_saved_tensor_hooks",
    "pytree",
    "top_saved_tensor_hooks",
]


@contextmanager
def without_saved_tensor_hooks(pack: Callable[[Tensor], Any] | None) -> Iterator[None]:
    """Takes the innermost saved-tensor hooks off if their pack hook is this one. Those around them then apply."""
    hooks = top_saved_tensor_hooks(True)
    if hooks is None or hooks[0] is not pack:
        yield
        return
    pop_saved_tensor_hooks()
    try:
        yield
    finally:
        push_saved_tensor_hooks(*hooks)


_VMAP = torch._C.DispatchKeySet(torch._C._dispatch_key_parse("VmapMode"))


def saves_tensors(outputs: Iterable[Tensor], node_class: type) -> bool:
    """Whether custom functions of this node class, among those that made these tensors, have saved a tensor."""
    nodes: list[Any] = [output.grad_fn for output in outputs]
    return any(type(node) is node_class and bool(getattr(node, "_raw_saved_tensors", ())) for node in nodes)


def version_of(tensor: Tensor) -> int:
    """Returns the version counter of a tensor, or 0 for an inference tensor, which has none."""
    return 0 if tensor.is_inference() else tensor._version


identity_of: Callable[[Tensor], int] = attrgetter("_cdata")
"""Returns an int that identifies the C++ tensor behind a Python object, as long as the tensor lives."""


base_of: Callable[[Tensor], Tensor | None] = attrgetter("_base")
"""Returns the base of a differentiable view, or None for any other tensor."""


is_differentiable_view: Callable[[Tensor], bool] = methodcaller("_is_view")
"""Whether autograd tracks the tensor as a view of another one."""


_PLAIN = (Tensor, nn.Parameter, nn.Buffer)


def is_plain(cls: type) -> bool:
    """Whether tensors of a class are torch's own."""
    return cls in _PLAIN


@cache
def is_thin(cls: type) -> bool:
    """Whether ops see tensors of a subclass as plain ones, because it does not override `__torch_dispatch__`."""
    return cls.__torch_dispatch__ is Tensor.__torch_dispatch__  # type: ignore[attr-defined]


DisableTorchFunction = torch._C.DisableTorchFunctionSubclass
DisableTorchFunctionAndModes = torch._C.DisableTorchFunction
"""A context manager in which methods of tensor subclasses do not run their `__torch_function__`."""


def dispatch_kind(tensor: Tensor) -> int:
    """Returns the dispatch keys of a tensor as a number, equal for tensors of equal device, lazy bits and kind."""
    kind: int = torch._C._dispatch_keys(tensor).raw_repr()
    return kind


is_memoryless_zero: Callable[[Tensor], bool] = methodcaller("_is_zerotensor")
"""Whether the tensor is a tensor of zeros that autograd has made without memory."""


def is_functorch_wrapped(tensor: Tensor) -> bool:
    """Whether a transform of torch.func has wrapped the tensor."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def is_batched(tensor: Tensor) -> bool:
    """Whether the tensor stands for a batch, of torch.func's vmap or of `is_grads_batched`."""
    return is_functorch_wrapped(tensor) or torch._C._functorch.is_legacy_batchedtensor(tensor)


def with_lazy_bits(tensor: Tensor, *, conjugate: bool, negative: bool) -> Tensor:
    """Returns a view of a tensor with its lazy conjugate bit, its lazy negative bit, or both set."""
    if conjugate:
        tensor = torch._conj(tensor)
    return torch._neg_view(tensor) if negative else tensor


def alias_of(tensor: Tensor) -> Tensor:
    """Returns a detached tensor that shares the memory and the version counter of another one.

    Below autograd, `detach` alone would give it a new counter, and writes through one would go unnoticed by the other.
    """
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def counter_of(tensor: Tensor) -> Tensor:
    """Returns a tensor without memory that has the version counter of another one. It keeps it with other `.data`."""
    counter: Tensor = Tensor._make_subclass(Tensor, tensor)  # as `detach`, but dispatch modes do not see it
    counter.data = _NO_MEMORY
    return counter


_NO_MEMORY = torch.empty(0)


sequence_number: Callable[[Node], int] = methodcaller("_sequence_nr")
"""Returns the position of a node in the order in which its thread made nodes. Backward runs the latest first."""


def edge_of(tensor: Tensor) -> GradientEdge:
    """Returns where the gradient of a tensor arrives. Unlike torch's edges it need not outlive the tensor."""
    node = tensor.grad_fn
    return get_gradient_edge(tensor) if node is None else GradientEdge(node, tensor.output_nr)


def sequence_of(tensor: Tensor) -> int:
    """Returns the sequence number of the node of a tensor that is no leaf."""
    assert tensor.grad_fn is not None
    return sequence_number(tensor.grad_fn)


is_view: Callable[[Tensor], bool] = methodcaller("_is_view")
"""Whether a tensor is a view for autograd."""


def is_leaf(tensor: Tensor) -> bool:
    """Whether a tensor is a leaf for autocast too, which caches no casts of views that take gradients."""
    return tensor.is_leaf and not (tensor.requires_grad and is_view(tensor))


def set_sequence_number(tensor: Tensor, number: int) -> None:
    """Changes the position of a tensor's `grad_fn` in the order of backward. The tensor must have one."""
    assert tensor.grad_fn is not None
    tensor.grad_fn._set_sequence_nr(number)  # type: ignore[attr-defined]


def applying(function: type[torch.autograd.Function]) -> Any:
    """Returns `function.apply` without what torch adds for transforms of torch.func, and what `pre_dispatch` adds."""
    return torch._C._FunctionBase.__dict__["apply"].__get__(None, function)


def backward_class(function: type[torch.autograd.Function]) -> Any:
    """Returns the class of the nodes that an autograd.Function makes."""
    return function._backward_cls


def is_node_of(node: Node, function: type[torch.autograd.Function]) -> bool:
    """Whether a node was made by an autograd.Function."""
    return type(node) is function._backward_cls


HOOK_METHODS = ("register_hook", "register_prehook", "_register_hook_dict")
"""The methods of a node by which hooks reach it. A tensor's `register_hook` calls the last one."""


def leaf_of(node: Node) -> Tensor | None:
    """Returns the leaf whose gradients a node accumulates; None for other nodes."""
    leaf: Tensor | None = getattr(node, "variable", None) if type(node).__name__ == "AccumulateGrad" else None
    return leaf


def leaf_references(node: Node) -> tuple[int, int]:
    """Returns how often Python and C++ refer to the leaf whose gradients a node accumulates."""
    leaf = leaf_of(node)
    assert leaf is not None
    return sys.getrefcount(leaf), leaf._use_count()  # type: ignore[attr-defined]


@contextmanager
def without_hooks(leaves: Iterable[Tensor]) -> Iterator[None]:
    """Suspends the hooks that `Tensor.register_hook` has registered on leaves.

    Otherwise `autograd.grad` would call them with what it computes for a leaf, even if that is a part of the gradient.
    """
    hooks = [(registered, dict(registered)) for leaf in leaves if (registered := leaf._backward_hooks)]
    try:
        for registered, _ in hooks:
            registered.clear()
        yield
    finally:
        for registered, present in hooks:
            registered.update(present)


def reads_running_statistics(node: Node) -> bool:
    """Whether a node needs the running statistics of a batch norm in eval mode, whose updates change no version."""
    return "BatchNorm" in node.name() and not getattr(node, "_saved_training", True)


_REFERENCES_IN_CALL = 2  # of the sequence, and of the argument


def is_referred_to(tensors: Sequence[Any], index: int) -> bool:
    """Whether anything but this sequence refers to one of its tensors. Autograd asks so before it takes a gradient."""
    return sys.getrefcount(tensors[index]) > _REFERENCES_IN_CALL or tensors[index]._use_count() > 1


references_in_torch: Callable[[Tensor], int] = methodcaller("_use_count")
"""Returns the number of references to the C++ tensor behind a Python object; that of the object itself is one."""


saved_alpha: Callable[[Any], Any] = attrgetter("_saved_alpha")
"""Returns the `alpha` by which the addition or subtraction of a node scaled its second operand."""


def saved_other(node: Any) -> Tensor | None:
    """Returns the second operand that a node saved, or None if saved-tensor hooks packed it.

    Unpacking it would run the hooks, and those of a segment would recompute the segment.
    """
    saved = node._raw_saved_other
    value: Tensor | None = saved.data if getattr(saved, "unpack_hook", saved) is None else None
    return value


def has_accumulation_hooks(parameter: Tensor) -> bool:
    """Whether a leaf has a hook that runs before or after its gradient is added to `.grad`."""
    return any(accumulation_hooks(parameter))


def accumulation_hooks(parameter: Tensor) -> tuple[tuple[tuple[int, Any], ...], ...]:
    """Returns a leaf's hooks by their numbers: those that run before its gradient is accumulated, and those after."""
    registered = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    return tuple([tuple((hooks or {}).items()) for hooks in registered])


def is_plain_backward() -> bool:
    """Whether the running backward pass is a `backward()` without `inputs`, which adds to `.grad` of every leaf."""
    return bool(torch.autograd._is_checkpoint_valid())  # type: ignore[no-untyped-call]


def backward_task_id() -> int:
    """Returns the number of the backward pass that runs in this thread, or -1 outside of one."""
    return torch._C._current_graph_task_id()


def call_when_backward_ends(then: Callable[[], None]) -> None:
    """Calls a function at the end of the backward pass that runs in this thread. `backward` raises what it raises."""
    torch.autograd.Variable._execution_engine.queue_callback(then)


def backward_pass() -> tuple[Any, Any]:
    """Returns this thread's GraphExecGroup or None, and the pass's identity: the group, else `backward_task_id()`."""
    group = torch._C._get_graph_exec_group()
    return group, backward_task_id() if group is None else group


def current_transforms_differentiate() -> bool | None:
    """Whether an active transform of torch.func takes gradients, or None if no transform is active."""
    stack = torch._C._functorch.get_interpreter_stack()
    if not stack:
        return None
    return any(level.key() == torch._C._functorch.TransformType.Grad for level in stack)


def is_in_vmap() -> bool:
    """Whether all active transforms of torch.func are vmaps, and there is at least one."""
    if _innermost_transform() is None:  # asked before each op
        return False
    stack = torch._C._functorch.get_interpreter_stack() or []
    return all(level.key() == torch._C._functorch.TransformType.Vmap for level in stack)


_innermost_transform: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack


def has_hooks_of_all_modules() -> bool:
    """Whether a hook is registered that runs for every module."""
    return bool(nn.modules.module._has_any_global_hook())  # type: ignore[no-untyped-call]


def is_in_forward_mode() -> bool:
    """Whether forward-mode differentiation is active."""
    return forward_ad._current_level >= 0


@contextmanager
def outside_transforms() -> Iterator[None]:
    """Suspends the transforms of torch.func and the vmap of batched gradients, in which torch refuses random ops."""
    with torch._C._ExcludeDispatchKeyGuard(_VMAP), temporarily_clear_interpreter_stack():
        yield


def container_node(value: Any) -> Any:
    """Returns pytree's functions that flatten and unflatten a container of this type."""
    return pytree.SUPPORTED_NODES[pytree._get_node_type(value)]


def is_selective_pair(first: Any, second: Any) -> bool:
    """Whether two contexts are a pair made by torch's `create_selective_checkpoint_contexts`."""
    return type(first) is _CachingTorchDispatchMode and type(second) is _CachedTorchDispatchMode


submodules_of: Callable[[nn.Module], dict[str, nn.Module | None]] = attrgetter("_modules")
"""Returns the direct submodules of a module by name. Changes of this dict change the module."""


arguments_of: Callable[[OpOverload], Any] = attrgetter("_schema.arguments")
"""Returns the arguments of an op's schema, in order."""


op_name: Callable[[OpOverload], str] = attrgetter("_schema.name")
"""Returns the name of an op with its namespace and without its overload, as in "aten::add"."""


returns_of: Callable[[OpOverload], Any] = attrgetter("_schema.returns")
"""Returns the return values that an op's schema declares, in order."""


def without_dynamo(function: Any) -> Any:
    """Wraps a function so that torch.compile does not trace it: the compiled graph breaks around each call."""
    from torch import _dynamo

    return _dynamo.disable(function)  # type: ignore[no-untyped-call]
