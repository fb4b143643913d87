"""Keeps code from using gradients that an open accumulation block still holds back.

NOTE [Guards]
1. While any block is open, these of torch lead here: `torch.autograd.backward`, which `Tensor.backward` calls; torch's
   functions that clip gradients or take their norm, also where they were imported by name; two methods of `GradScaler`;
   the methods of a tensor that register hooks, of which the block must know; and the method that begins each forward of
   DistributedDataParallel. They concern the block of the calling thread, and behave as always in other threads.
2. A hook that torch runs before the steps of all optimizers sees those of the block's parameters.
3. Code that reads `.grad` itself cannot be detected. It sees what was there before the block.
4. A block counts as open only once all of these are replaced. Until then, and after Ctrl-C has cut the replacing or the
   restoring short, a replaced name behaves as always, and the next block that opens or ends restores it.
"""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import GradientEdge
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from backhaul._accumulate.block import AccumulationBlock
from backhaul_runtime.errors import AccumulationError
from backhaul_runtime.torch_internals.clipping import clipping_cells
from backhaul_runtime.torch_internals.data_parallel import PRE_FORWARD
from backhaul_runtime.torch_internals.private import backward_task_id

_TOO_EARLY = "{what} inside {block}, whose gradients are complete only when it ends. Call it after the block"


class _Guards:
    """The replaced names, and the open blocks for which they are replaced.

    Ctrl-C may end each method at any line (Rule 4).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards all fields
        self._replaced: list[tuple[Any, str, Any, Any]] = []  # the owner and its attribute, what was there, the guard
        self._step_hooks: list[RemovableHandle] = []
        self._blocks: dict[int, AccumulationBlock] = {}  # by the thread that opened it; another may end a generator

    def enter(self, thread: int, block: AccumulationBlock) -> None:
        """Makes a block the one of a thread, once all names are replaced."""
        with self._lock:
            if not self._blocks:
                self._restore_all()  # what Ctrl-C has left of another `enter` or `leave`
                self._replace_all()
            self._blocks[thread] = block

    def leave(self, thread: int, block: AccumulationBlock) -> None:
        """Ends what `enter` did, if it has done anything."""
        with self._lock:
            if self._blocks.get(thread) is block:
                del self._blocks[thread]
            if not self._blocks:
                self._restore_all()

    def block_of(self, thread: int) -> AccumulationBlock | None:
        """Returns the open block of a thread. It takes no lock, because guards call it."""
        block = self._blocks.get(thread)
        return block if block is not None and block.is_open else None  # Ctrl-C may have kept it from leaving

    def _replace_all(self) -> None:
        self._replace(torch.autograd, "backward", _finishing_first)
        for cell in clipping_cells():
            self._replace(cell, "cell_contents", _refusing("clipping gradients"))
        self._replace(torch.amp.GradScaler, "unscale_", _refusing("GradScaler.unscale_()"))
        self._replace(torch.amp.GradScaler, "step", _refusing("GradScaler.step()"))
        for name in ("register_hook", "retain_grad"):
            self._replace(torch.Tensor, name, _noting_the_node)
        self._replace(DistributedDataParallel, PRE_FORWARD, _noting_the_reduction)
        self._step_hooks.append(register_optimizer_step_pre_hook(_check_step))

    def _replace(self, owner: Any, name: str, guarded: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        own = getattr(owner, name)
        guard = guarded(own)
        self._replaced.append((owner, name, own, guard))  # first, so that Ctrl-C leaves no guard that nobody knows
        setattr(owner, name, guard)

    def _restore_all(self) -> None:
        """Restores what is replaced. It may run again after Ctrl-C, and meanwhile others may have replaced names."""
        while self._step_hooks:
            self._step_hooks[-1].remove()
            self._step_hooks.pop()
        while self._replaced:
            owner, name, own, guard = self._replaced[-1]
            if getattr(owner, name) is guard:
                setattr(owner, name, own)
            self._replaced.pop()


def _present() -> AccumulationBlock | None:
    """Returns the open block of the calling thread."""
    return _guards.block_of(threading.get_ident())


def _finishing_first(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Returns torch.autograd.backward, which first finishes the micro-batches before it."""

    @functools.wraps(backward)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        block = _present()
        # A backward inside a backward, of the block or of the user, belongs to that one.
        if block is not None and not block.is_working and backward_task_id() < 0:
            if block.is_deferring and (loss := _only_loss(*args, **kwargs)) is not None:
                block.backward(loss)
                return None
            tensors = args[0] if args else kwargs.get("tensors", ())
            block.flush([tensors] if isinstance(tensors, torch.Tensor | GradientEdge) else tensors)
        return backward(*args, **kwargs)

    return guarded


def _only_loss(
    tensors: Any, grad_tensors: Any = None, retain_graph: Any = None, create_graph: Any = False, *rest: Any, **more: Any
) -> torch.Tensor | None:
    """Returns the scalar that torch.autograd.backward was called with; None for a call that cannot be deferred."""
    is_plain = grad_tensors is None and not retain_graph and not create_graph
    if not is_plain or any(argument is not None for argument in (*rest, *more.values())):
        return None
    loss = tensors if isinstance(tensors, torch.Tensor) else tensors[0] if len(tensors) == 1 else None
    return loss if isinstance(loss, torch.Tensor) and loss.grad_fn is not None and loss.numel() == 1 else None


def _refusing(what: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns a decorator for functions that need complete gradients."""

    def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            block = _present()
            if block is not None and block.micro_batches and not block.is_complete:
                raise AccumulationError(_TOO_EARLY.format(what=what, block=block.name))
            return function(*args, **kwargs)

        return guarded

    return decorated


def _noting_the_node(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a method that registers a hook, and tells the block, because nodes do not show their hooks."""

    @functools.wraps(method)
    def guarded(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        block = _present()
        if block is not None and tensor.grad_fn is not None:
            block.hooked.add(tensor.grad_fn)
        return method(tensor, *args, **kwargs)

    return guarded


def _noting_the_reduction(pre_forward: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the method, which tells the block that DistributedDataParallel may expect to reduce gradients."""

    @functools.wraps(pre_forward)
    def guarded(model: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
        block = _present()
        if block is not None:
            block.begin_forward(model)
        return pre_forward(model, *args, **kwargs)

    return guarded


def _check_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    block = _present()
    if block is None or block.ends_in_closure:
        return
    if block.holds(p for group in optimizer.param_groups for p in group["params"]):
        raise AccumulationError(_TOO_EARLY.format(what="an optimizer's step()", block=block.name))


_guards = _Guards()


@contextmanager
def open_block(block: AccumulationBlock) -> Iterator[None]:
    """Makes a block the one of this thread.

    Raises:
        AccumulationError: A block is open in this thread already.
    """
    outer, thread = _present(), threading.get_ident()
    if outer is not None:
        raise AccumulationError(f"{outer.name} is open in this thread already: blocks can't be nested")
    try:
        _guards.enter(thread, block)
        yield
    finally:
        _guards.leave(thread, block)
