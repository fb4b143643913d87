"""Gradients that are pending until their accumulation block ends.

NOTE [Pending gradients]
1. `.grad` must become ((G + g1) + g2) + ..., where G is what it held before the block and g1, g2, ... are the gradients
   of the micro-batches. Sums of floating-point numbers depend on their order, so only a beginning of this fold may be
   added up in advance. With G it is added up to the last gradient but one, beginning with a copy of G.
2. A worker may add up a parameter's gradients if every micro-batch so far has left all of that gradient there. What the
   trainer gets later is added after the worker's sum.
3. Hooks of a parameter see the gradient of each micro-batch, when the block ends. So such gradients are not added up.
   Hooks of several parameters are called in the order in which autograd would have completed their gradients.
4. Gradients reach `.grad` through autograd, so a layout that autograd prefers is respected, and hooks of parameters are
   called. For models of DDP see NOTE [Reductions].
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import pairwise
from operator import itemgetter

import torch
from torch import Tensor, nn

from backhaul._accumulate.reductions import Reductions, add_without_hooks, reduce
from backhaul._torch_api.fsdp import reduces_in_backward
from backhaul._worker_client.upload.uploader import Uploader
from backhaul_runtime.errors import AccumulationError
from backhaul_runtime.tensors.digest import content_digest
from backhaul_runtime.tensors.layout import layout_of
from backhaul_runtime.torch_internals.private import accumulation_hooks, has_accumulation_hooks, version_of
from backhaul_runtime.torch_internals.storages import storage_key

Order = tuple[int, int]
"""The number of a micro-batch, and the position of a leaf in the order of its backward."""


@dataclass(slots=True, eq=False)
class _Pending:
    leaf: Tensor
    state: object  # what must not change until the gradients are delivered
    may_sum: bool  # Rules 1 and 3
    may_stay: bool  # Rule 2. Once it is False it remains so
    owner: Uploader | None = None  # the only one whose worker may keep gradients
    elsewhere: int | None = None  # the first micro-batch whose gradient is not computed there alone
    has_stayed: bool = False  # whether that worker keeps any
    gradients: list[tuple[Order, Tensor]] = field(default_factory=list)
    is_own: bool = False  # whether the only gradient is a sum that nothing else refers to
    total: Tensor | None = None  # with a G that may be summed: the fold of all gradients but the last


class PendingGradients:
    """The pending gradients of an accumulation block. Thread-safe."""

    def __init__(self) -> None:
        self._pending: dict[int, _Pending] = {}  # by id of the leaf, which is kept alive
        self._lock = threading.Lock()  # guards what may stay on which worker

    @property
    def size_bytes(self) -> int:
        """Bytes of the pending gradients and sums. A sparse one counts as if it were dense."""
        gradients = [gradient for pending in self._pending.values() for _, gradient in pending.gradients]
        gradients += [pending.total for pending in self._pending.values() if pending.total is not None]
        return sum(gradient.numel() * gradient.element_size() for gradient in gradients)

    def enter(self, leaves: Iterable[Tensor]) -> None:
        """Notes leaves that a micro-batch leads to, before anything of it is computed."""
        is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        before = len(self._pending)
        for leaf in leaves:
            if id(leaf) not in self._pending:
                is_plain = not has_accumulation_hooks(leaf) and (getattr(leaf, "grad_dtype", leaf.dtype) is leaf.dtype)
                if reduces_in_backward(leaf):
                    raise AccumulationError(
                        "accumulate() can't be used in a process that has a model of FSDP, which reduces gradients "
                        "while backward runs: call loss.backward() for each micro-batch instead"
                    )
                if is_distributed and not is_plain:
                    raise AccumulationError(
                        "accumulate() can't be used with hooks on parameters in distributed training: each process "
                        "has to reduce a parameter once, but to call its hooks for each micro-batch"
                    )
                may_stay = is_plain and leaf.grad is None and isinstance(leaf, nn.Parameter)
                self._pending[id(leaf)] = _Pending(leaf, _state(leaf), is_plain, may_stay)
        if len(self._pending) > before:
            _check_apart(pending.leaf.grad for pending in self._pending.values() if pending.leaf.grad is not None)

    def changed(self) -> Tensor | None:
        """Returns a leaf whose values, hooks or requires_grad have changed in the block; None if there is none."""
        return next((pending.leaf for pending in self._pending.values() if _state(pending.leaf) != pending.state), None)

    def holds(self, leaf: Tensor) -> bool:
        """Whether the block has seen a leaf."""
        return id(leaf) in self._pending

    @property
    def is_empty(self) -> bool:
        """Whether no leaf was seen since the last delivery."""
        return not self._pending

    def has_gradient(self, leaf: Tensor) -> bool:
        """Whether the micro-batches that are finished have left a gradient of a leaf that one of them uses."""
        pending = self._pending.get(id(leaf))
        return pending is not None and bool(pending.gradients or pending.has_stayed or leaf.grad is not None)

    def plan(self, leaf: Tensor, uploader: Uploader | None, micro_batch: int) -> None:
        """Notes where a micro-batch's gradient of a leaf is computed. Call it in the order of the micro-batches.

        Args:
            leaf: The leaf that the gradient belongs to.
            uploader: The uploader of the worker that computes all of the gradient; None if no single one does.
            micro_batch: The number of the micro-batch.
        """
        pending = self._pending[id(leaf)]
        with self._lock:
            pending.owner = pending.owner or uploader
            if pending.elsewhere is None and (uploader is None or uploader is not pending.owner):
                pending.elsewhere = micro_batch

    def may_stay(self, leaf: Tensor, uploader: Uploader, micro_batch: int) -> bool:
        """Whether a worker may keep a micro-batch's gradient of a leaf (Rule 2)."""
        pending = self._pending[id(leaf)]
        with self._lock:
            is_early = pending.elsewhere is None or micro_batch < pending.elsewhere
            return pending.may_stay and is_early and pending.owner is uploader

    def stayed(self, leaf: Tensor, *, is_uncollected: bool) -> None:
        """Notes whether a worker has kept what it was allowed to keep."""
        pending = self._pending[id(leaf)]
        with self._lock:
            pending.may_stay = pending.may_stay and is_uncollected
            pending.has_stayed = pending.has_stayed or is_uncollected

    def drop(self) -> None:
        """Forgets everything, at the end of the block."""
        with self._lock:
            self._pending.clear()

    def stop_keeping(self) -> None:
        """Lets no worker keep gradients in the rest of the block."""
        with self._lock:
            for pending in self._pending.values():
                pending.may_stay = False

    def add(self, leaf: Tensor, order: Order, gradient: Tensor) -> None:
        """Adds a micro-batch's gradient of a leaf. Call it in the order of the micro-batches.

        Args:
            leaf: The leaf that the gradient belongs to.
            order: The place of the gradient among those of the block.
            gradient: The whole gradient of the micro-batch, which the caller no longer uses.
        """
        pending = self._pending[id(leaf)]
        if not (pending.may_sum and not pending.has_stayed and len(pending.gradients) == 1):
            pending.gradients.append((order, gradient))
            return
        ((_, total),) = pending.gradients
        if leaf.grad is not None:
            if not leaf.grad.requires_grad and _is_like(leaf.grad, total) and _is_like(total, gradient):
                pending.total = leaf.grad.clone() if pending.total is None else pending.total
                pending.total.add_(total)
                pending.gradients.clear()
            pending.gradients.append((order, gradient))
            return
        if (total.layout, gradient.layout, total.dtype) != (torch.strided, torch.strided, gradient.dtype):
            pending.gradients.append((order, gradient))
        elif pending.is_own:
            total.add_(gradient)
        else:
            pending.gradients[0], pending.is_own = (order, total + gradient), True

    def put_first(self, sums: Mapping[int, Tensor]) -> None:
        """Puts sums, by the id of their leaf, before the pending gradients of the same leaves."""
        for key, total in sums.items():
            pending = self._pending[key]
            pending.gradients.insert(0, ((0, 0), total))
            pending.has_stayed = pending.is_own = False

    def deliver(self, reductions: Reductions, changed: Callable[[], Tensor | None]) -> None:
        """Adds all gradients to `.grad` through autograd, and forgets them.

        Leaves with hooks come first. If anything raises an error, as a hook may, each `.grad` becomes what it was.

        Args:
            reductions: The reductions of the block, which this call lets DDP do.
            changed: Returns a parameter that was written to without a new version; None if there is none.

        Raises:
            AccumulationError: A hook has changed a parameter.
        """
        all_pending, self._pending = list(self._pending.values()), {}
        hooked = [pending for pending in all_pending if has_accumulation_hooks(pending.leaf)]
        present = [pending.leaf.grad for pending in hooked]
        before = list(map(_Before, hooked))
        plain = {id(pending.leaf): pending for pending in all_pending if pending not in hooked}
        # A hook may write to its own gradient. Others in the same buffer get a new version then, but no new contents.
        shared = {storage_key(gradient) for gradient in present if gradient is not None and _has_memory(gradient)}

        def states() -> list[object]:
            plain_states = (_state_beside(pending.leaf, shared) for pending in plain.values())
            return [*[_settings(pending.leaf) for pending in hooked], *plain_states]

        present_states = states()
        try:
            _deliver(hooked, _in_order)  # first, as a hook may raise, and nothing else is to be undone then
            # A hook that steps an optimizer changes weights with which other micro-batches were not computed.
            if present_states != states() or (hooked and changed() is not None):
                raise AccumulationError(
                    "a hook of a parameter has changed a parameter, or the .grad of another one, when a block ended. "
                    "Its other micro-batches were computed before: step optimizers after the block, and not in hooks"
                )
            for pending in plain.values():
                before.append(_Before(pending))
                # The sum began from `.grad`, so it replaces `.grad`. Adding it would count the earlier part twice.
                if pending.total is not None and pending.leaf.grad is not None:
                    with torch.no_grad():
                        pending.leaf.grad.copy_(pending.total)
                    pending.total = None  # its memory is that of the copy in `before`
            self._deliver_plain(plain, reductions)
        except BaseException:  # Ctrl-C as well: a block that is run again would add some gradients twice
            for one in before:
                one.restore()
            raise

    @staticmethod
    def _deliver_plain(plain: Mapping[int, _Pending], reductions: Reductions) -> None:
        reducing = reductions.reducing()
        last = {id(leaf): gradients.pop()[1] for leaf in reducing if (gradients := plain[id(leaf)].gradients)}
        for pending in plain.values():
            if reductions.is_expected(pending.leaf):
                add_without_hooks(pending.leaf, [gradient for _, gradient in pending.gradients])
                pending.gradients.clear()
        _deliver(plain.values())
        for leaf in reducing:
            reduce(leaf, last.pop(id(leaf), None))


class _Before:
    """The `.grad` of a leaf before gradients are added to it."""

    def __init__(self, pending: _Pending) -> None:
        self._leaf, self._gradient = pending.leaf, pending.leaf.grad
        self._values = None if self._gradient is None else self._gradient.clone()
        self._version = None if self._gradient is None else version_of(self._gradient)

    def restore(self) -> None:
        """Gives the leaf the same tensor with the same values. One that was not written to may be read-only."""
        if self._gradient is not None and self._values is not None and version_of(self._gradient) != self._version:
            with torch.no_grad():
                self._gradient.copy_(self._values)
        self._leaf.grad = self._gradient


def _state(leaf: Tensor) -> object:
    gradient = leaf.grad
    return _settings(leaf), None if gradient is None else (id(gradient), version_of(gradient))


def _state_beside(leaf: Tensor, storages: Set[int]) -> object:
    """Returns a state that does not change if others write elsewhere in these storages, as into one flat buffer."""
    gradient = leaf.grad
    if gradient is None or not _has_memory(gradient) or storage_key(gradient) not in storages:
        return _state(leaf)
    # Views of one buffer have one version counter.
    return _settings(leaf), id(gradient), content_digest(gradient, layout_of(gradient))


def _settings(leaf: Tensor) -> object:
    return version_of(leaf), leaf.requires_grad, accumulation_hooks(leaf)


def _deliver(
    all_pending: Iterable[_Pending], targets_of: Callable[[Sequence[Tensor]], Sequence[Tensor]] = lambda leaves: leaves
) -> None:
    """Adds gradients to `.grad` in the order of the micro-batches, those of each in one backward.

    Args:
        all_pending: The leaves with their gradients.
        targets_of: Returns tensors to begin a backward at, which lead to leaves.
    """
    passes: dict[int, list[tuple[int, Tensor, Tensor]]] = {}
    for pending in all_pending:
        may_fold = pending.may_sum and pending.leaf.grad is None
        if may_fold and all(gradient.layout is torch.strided for _, gradient in pending.gradients):
            pending.gradients[:] = _folded(pending.gradients)
        for (micro_batch, position), gradient in pending.gradients:
            passes.setdefault(micro_batch, []).append((position, pending.leaf, gradient))
        pending.gradients.clear()
    for number in sorted(passes):
        _, leaves, gradients = zip(*sorted(passes.pop(number), key=itemgetter(0)), strict=True)
        torch.autograd.backward(targets_of(leaves), gradients)


def _in_order(leaves: Sequence[Tensor]) -> list[Tensor]:
    """Returns aliases of leaves, from which autograd reaches the leaves in this order: the latest node comes first."""
    with torch.enable_grad():
        return [torch.ops.aten.alias(leaf) for leaf in reversed(leaves)][::-1]


def _has_memory(gradient: Tensor) -> bool:
    return type(gradient) is Tensor and gradient.layout is torch.strided and gradient.numel() > 0


def _span(gradient: Tensor) -> tuple[str, int, int]:
    """Returns a gradient's device, and the addresses of its first byte and of the one behind its last."""
    last = sum((size - 1) * stride for size, stride in zip(gradient.shape, gradient.stride(), strict=True))
    begin = gradient.data_ptr()
    return str(gradient.device), begin, begin + (last + 1) * gradient.element_size()


def _check_apart(gradients: Iterable[Tensor]) -> None:
    """Raises AccumulationError if two gradients share memory, so that adding to one would change the other."""
    spans = sorted(map(_span, filter(_has_memory, gradients)))
    if any(one == other and end > begin for (one, _, end), (other, begin, _) in pairwise(spans)):
        raise AccumulationError(
            "the .grad of two parameters share memory, so a block can't add to one without changing the other: set "
            "them to None before the block"
        )


def _folded(gradients: list[tuple[Order, Tensor]]) -> list[tuple[Order, Tensor]]:
    if not gradients:
        return []
    (_, total), *others = gradients
    for _, gradient in others:
        total = total + gradient
    return [((0, 0), total)]


def _is_like(one: Tensor, other: Tensor) -> bool:
    """Whether the sum of two gradients is what autograd computes in place."""
    return (one.layout, one.dtype, one.shape) == (torch.strided, other.dtype, other.shape) and (
        other.layout is torch.strided
    )
