"""torch's higher-order op flex_attention, which takes functions of single numbers.

Nothing is imported from `torch._dynamo` before it is used, because that import takes a second.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from backhaul_runtime.torch_internals.private import (
    pop_saved_tensor_hooks,
    push_saved_tensor_hooks,
    top_saved_tensor_hooks,
)

_module: Any = import_module("torch._higher_order_ops.flex_attention")  # of the package, this name is the op


class _Tracing(threading.local):
    """What tracing the op has left in a thread.

    Attributes:
        hooks: The number of hooks that it registered.
    """

    hooks = 0


_tracing = _Tracing()
_trace: Any = _module.create_fw_bw_graph


@wraps(_trace)
def _traced(*args: Any, **kwargs: Any) -> Any:
    """Traces the functions of the op for autograd, on tensors without memory. Saved-tensor hooks do not see these."""
    first, hooks = RemovableHandle.next_id, []
    while (top := top_saved_tensor_hooks(True)) is not None:
        hooks.append(top)
        pop_saved_tensor_hooks()
    try:
        return _trace(*args, **kwargs)
    finally:
        for pair in reversed(hooks):
            push_saved_tensor_hooks(*pair)
        _tracing.hooks += RemovableHandle.next_id - first


_module.create_fw_bw_graph = _traced


def registered_hooks() -> int:
    """Returns a number that is another one when a hook was registered, but for those of tracing in this thread."""
    return RemovableHandle.next_id - _tracing.hooks


def run_flex_attention(*args: Any) -> Sequence[Tensor]:
    """Runs the op: output, logsumexp and the largest scores."""
    returned: Sequence[Tensor] = _module.flex_attention(*args)
    return returned


def index_buffer(buffer: Tensor, indices: Sequence[Tensor]) -> Tensor:
    """Returns `buffer[indices]` as it is computed inside of score_mod and mask_mod."""
    from torch._dynamo._trace_wrapped_higher_order_op import mod_index

    indexed: Tensor = mod_index(buffer, list(indices))
    return indexed


def is_indexing(function: type) -> bool:
    """Whether a custom autograd function is the one behind `index_buffer`."""
    from torch._dynamo._trace_wrapped_higher_order_op import ModIndex

    return function is ModIndex


@contextmanager
def indexing_by_tensors() -> Iterator[None]:
    """A context in which `buffer[indices]` takes tensors for indices, as inside of score_mod and mask_mod."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    with TransformGetItemToIndex():
        yield


def higher_order_op() -> Callable[..., Any]:
    """Returns the op itself, for a graph that Inductor compiles."""
    op: Callable[..., Any] = _module.flex_attention
    return op
