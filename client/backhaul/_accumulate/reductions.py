"""Models of DistributedDataParallel in an accumulation block.

NOTE [Reductions]
1. DistributedDataParallel (DDP) reduces gradients over all ranks. After each forward outside of `no_sync()` it expects
   one backward, and reduces each parameter when autograd has added to its `.grad`. So in the loop that a block stands
   for, the backward of one micro-batch reduces, and the sum that it reduces includes the micro-batches before it.
2. At the end of the block, what a parameter gets from other micro-batches is added to `.grad` without the hooks of DDP.
   Then autograd adds what it gets from the micro-batch that reduces, which calls them.
3. In a model with `find_unused_parameters`, DDP reduces parameters that the micro-batch does not use together with the
   first one that it does use. So Rule 2 is followed for all parameters before it is for any gradient that reduces.
   A parameter that the micro-batch uses without giving it a gradient calls DDP as well.
4. DDP also notes which parameters a micro-batch under `no_sync()` has used, because it reduces no parameter that no
   rank has used since the last reduction. It notes that only before the forward of the micro-batch that reduces. So
   when that forward begins, the block finishes the earlier micro-batches and tells DDP which parameters have gradients.
5. A model can reduce in one micro-batch of a block, the last that uses it. Another order would need a reduction before
   the end of the block, and is an error.
6. DDP puts gradients into buckets in the order in which the first reduction meets them. Among more than two ranks, the
   place in a bucket can decide in which order the ranks' gradients are added. So the backward of the first micro-batch
   that reduces is left undivided, and its gradients are delivered in autograd's order.
7. In the first backward of a static graph, DDP counts the uses of parameters while autograd runs. Nothing may be held
   back then, so the block is an error.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from backhaul_runtime.errors import AccumulationError
from backhaul_runtime.torch_internals.data_parallel import is_still_counting, is_still_ordering


@dataclass(slots=True, eq=False)
class _Reduction:
    """A reduction that a model expects. `micro_batch` is 0 until a micro-batch has used the model."""

    micro_batch: int = 0
    leaves: list[Tensor] = field(default_factory=list)  # what that micro-batch uses, in the order of delivery


_abandoned: "WeakSet[DistributedDataParallel]" = WeakSet()
"""Models that still expect the reduction of a block that has failed."""


class Reductions:
    """The reductions that models expect in a block. Only the thread of the block uses it."""

    def __init__(self) -> None:
        self._expected: dict[DistributedDataParallel, _Reduction] = {}
        self._model_of: dict[int, DistributedDataParallel] = {}  # by id of the parameter, which the model keeps alive

    def expect(self, model: DistributedDataParallel) -> bool:
        """Notes that a forward of a model begins. DDP expects a reduction unless the forward is under `no_sync()`.

        Returns:
            Whether the block must tell DDP which parameters have gradients (Rule 4).

        Raises:
            AccumulationError: The block can't reduce when the model would (Rules 5 and 7).
        """
        if not (torch.is_grad_enabled() and model.require_backward_grad_sync):
            return False
        if is_still_counting(model):
            raise AccumulationError(
                "accumulate() can't be used for the first step of a DistributedDataParallel model with "
                "static_graph=True, in which it counts how often parameters are used: run the first step without it"
            )
        if (expected := self._expected.get(model)) is not None:
            self._check_unused(expected)
            return False
        notes_uses = model.find_unused_parameters and not model.static_graph
        if notes_uses and model in _abandoned:  # the notes of Rule 4 would begin the old reduction
            raise AccumulationError(
                "a DistributedDataParallel model with find_unused_parameters=True still expects the reduction of a "
                "block that has failed: wrap its module in DistributedDataParallel again before the next block"
            )
        self._expected[model] = _Reduction()
        self._model_of |= {id(parameter): model for parameter in model.parameters()}
        return notes_uses

    def enter(self, leaves: Iterable[Tensor], micro_batch: int) -> bool:
        """Notes the leaves of a micro-batch. Returns whether its graph must stay undivided (Rule 6).

        Raises:
            AccumulationError: An earlier micro-batch already reduces the gradients of one of the leaves.
        """
        reducing = dict[DistributedDataParallel, _Reduction]()
        for leaf in leaves:
            model = self._model_of.get(id(leaf))
            if model is not None:
                reduction = reducing[model] = self._expected[model]
                if reduction.micro_batch != micro_batch:
                    self._check_unused(reduction)
                    reduction.micro_batch = micro_batch
                reduction.leaves.append(leaf)
        return any(map(is_still_ordering, reducing))

    @staticmethod
    def _check_unused(reduction: _Reduction) -> None:
        if reduction.micro_batch:
            raise AccumulationError(
                f"a DistributedDataParallel model reduces its gradients in micro-batch {reduction.micro_batch} of the "
                "block, but a later one uses it as well: run all micro-batches but the last one under no_sync()"
            )

    @contextmanager
    def ordering(self, leaves: Iterable[Tensor]) -> Iterator[None]:
        """Puts the leaves of reductions into the order in which autograd reaches them inside the context (Rule 6)."""
        places = dict[int, int]()

        def reached(leaf: Tensor, _: Tensor) -> None:
            places.setdefault(id(leaf), len(places))

        register: Callable[[Tensor, Callable[[Tensor], None]], Any] = Tensor.register_hook
        hooks = [register(leaf, partial(reached, leaf)) for leaf in leaves if self.is_expected(leaf)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        for reduction in self._expected.values():
            reduction.leaves.sort(key=lambda leaf: places.get(id(leaf), len(places)))

    def is_expected(self, leaf: Tensor) -> bool:
        """Whether DDP expects to reduce the gradient of a leaf."""
        return id(leaf) in self._model_of

    def reducing(self) -> list[Tensor]:
        """Returns the leaves whose gradients the block has to reduce, in the order in which it delivers them."""
        return [leaf for reduction in self._expected.values() for leaf in reduction.leaves]

    def abandon(self) -> None:
        """Notes that the block has failed, so that its reductions will not be done."""
        _abandoned.update(self._expected)

    def end(self, leaves: Iterable[Tensor] = ()) -> None:
        """Forgets the reductions that the block has done, and those that a backward of the user's will do.

        Args:
            leaves: The leaves to which the loss of that backward leads.
        """
        done = {self._model_of.get(id(leaf)) for leaf in leaves}
        done |= {model for model, reduction in self._expected.items() if reduction.micro_batch}
        self._expected = {model: reduction for model, reduction in self._expected.items() if model not in done}
        self._model_of = {key: model for key, model in self._model_of.items() if model not in done}


class _WithoutGradient(torch.autograd.Function):
    """Leads to a leaf, and gives it no gradient."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> None:
        return None


def reduce(leaf: Tensor, gradient: Tensor | None) -> None:
    """Adds a gradient to `.grad` and calls DDP's hook, also if there is no gradient (Rule 3)."""
    if gradient is None:
        torch.autograd.backward(_WithoutGradient.apply(leaf))  # type: ignore[no-untyped-call]
    else:
        torch.autograd.backward(leaf, gradient)


def note_use(leaf: Tensor) -> None:
    """Calls DDP's hook, so that DDP notes that a leaf has a gradient (Rule 4). Leaves `.grad` as it is."""
    before = leaf.grad
    if before is None:
        leaf.grad = leaf.detach()  # the hook looks whether there is one
    try:
        reduce(leaf, None)
    finally:
        leaf.grad = before


def add_without_hooks(leaf: Tensor, gradients: Iterable[Tensor]) -> None:
    """Adds gradients to `.grad` one by one, as autograd does, but without calling hooks (Rule 2)."""
    twin = leaf.detach().requires_grad_()  # accumulates in a node of its own
    twin.grad = leaf.grad
    for gradient in gradients:
        torch.autograd.backward(twin, gradient)
    leaf.grad = twin.grad
