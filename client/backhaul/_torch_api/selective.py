"""Selective checkpointing: what a policy chooses stays on the trainer, the rest is recomputed.

NOTE [Selection]
1. A policy sees the ops below autograd and says of each whether its results are kept. Tensors in their memory that
   autograd saves later are kept too: they are neither recomputed nor sent.
2. Where the trainer recomputes, an op whose results are kept gives these and does not run again. It is known by its
   place among the calls of that op, and by what it is given. Values are checked as those of any recomputation.
3. Ops that return views or write to what they are given run again: their results are nothing by themselves.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    SelectiveCheckpointContext,
)

from backhaul_runtime.program.op_rules import rules, tensors_in
from backhaul_runtime.tensors.deferred_digest import Digest, read
from backhaul_runtime.tensors.digest import content_digest, saved_digest
from backhaul_runtime.tensors.layout import copy_exact, layout_of, unsupported_reason
from backhaul_runtime.torch_internals.dispatch_mode import DispatchMode
from backhaul_runtime.torch_internals.private import OpOverload, alias_of, is_selective_pair, pytree, version_of
from backhaul_runtime.torch_internals.storages import StorageLedger, storage_key

_KEPT = {True, CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE}
_OFFLOADED = {CheckpointPolicy.MUST_CPU_OFFLOAD, CheckpointPolicy.PREFER_CPU_OFFLOAD}
MUTATED = "Tensor cached during selective activation checkpoint has been mutated"
Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


class Selection(DispatchMode):
    """Enter it around the call.

    Args:
        policy: As `create_selective_checkpoint_contexts` takes it, and with its bools.
        may_change: Whether the function may write to what is kept.
        hooks: That what is kept goes through; None for none.

    Attributes:
        again: For a recomputation here: an op whose results are kept does not run again.
        is_mutated: Whether, against the rule, the function wrote to what was chosen. Known once it has ended.
    """

    def __init__(self, policy: Callable[..., Any], *, may_change: bool, hooks: Hooks | None) -> None:
        super().__init__()
        self._policy = policy
        self._may_change = may_change
        self._hooks = hooks
        self._seen = StorageLedger()  # so that no storage takes the place of another
        self._results: dict[int, _Result] = {}
        self._versions: list[tuple[Tensor, int]] = []
        self._is_keeping = False
        self.again = _Recomputation()
        self.is_mutated = False

    @classmethod
    def of(cls, first: Any, second: Any, hooks: Hooks | None) -> "Selection | None":
        """What stands behind contexts that torch's `create_selective_checkpoint_contexts` made, None for others."""
        if not is_selective_pair(first, second):
            return None
        return cls(first.policy_fn, may_change=second.allow_cache_entry_mutation, hooks=hooks)

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs an op and asks the policy about it."""
        kwargs = kwargs or {}
        returned = op(*args, **kwargs)
        if op in SAC_IGNORED_OPS or self._is_keeping:
            return returned
        context = SelectiveCheckpointContext(is_recompute=False)
        context.op_output = returned
        choice = self._policy(context, op, *args, **kwargs)
        is_kept = choice in _KEPT or choice in _OFFLOADED
        kept = self._keep_results(returned, is_offloaded=choice in _OFFLOADED) if is_kept else None
        self.again.note(op, args, kept if _stands_alone(op) else None)
        return returned

    def _keep_results(self, returned: Any, *, is_offloaded: bool) -> "Callable[[], Any] | None":
        """Keeps what an op returned. Gives what gives it back, None for kinds of tensors that can't be kept."""
        leaves, spec = pytree.tree_flatten(returned)
        tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}
        if any(map(unsupported_reason, tensors.values())):
            return None  # without a storage there is nothing to know it by: it is recomputed
        kept = {key: self._kept(alias_of(tensor), is_offloaded=is_offloaded) for key, tensor in tensors.items()}
        for key, tensor in tensors.items():
            self._seen.add(tensor)
            self._results[storage_key(tensor)] = _Result(tensor, kept[key], is_offloaded)
            if not self._may_change:
                self._versions.append((alias_of(tensor), version_of(tensor)))
        parts = [kept.get(id(leaf), leaf) for leaf in leaves]

        def given() -> Any:
            results = [part().detach() if isinstance(part, KeptTensor) else part for part in parts]
            if self._may_change:  # the recomputation may write to it as well
                results = [copy_exact(part) if isinstance(part, Tensor) else part for part in results]
            return pytree.tree_unflatten(results, spec)

        return given

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self.is_mutated = any(version_of(tensor) != version for tensor, version in self._versions)
        self._versions.clear()

    def keep(self, tensor: Tensor) -> "KeptTensor | None":
        """Keeps a tensor that autograd saves, if the policy chose the memory it lies in. Returns what gives it back."""
        result = None if unsupported_reason(tensor) else self._results.get(storage_key(tensor))
        if result is None:
            return None
        if result.is_same(tensor):
            return _SharedTensor(result.kept)
        return self._kept(tensor.detach(), is_offloaded=result.is_offloaded)

    def _kept(self, tensor: Tensor, *, is_offloaded: bool) -> "KeptTensor":
        kept = KeptTensor(tensor, None if self._may_change else version_of(tensor))
        self._is_keeping = True  # what keeping takes is no op of the function's
        try:
            if is_offloaded:
                kept.offload()
            if self._hooks is not None:
                kept.pack(*self._hooks)
        finally:
            self._is_keeping = False
        return kept


def _stands_alone(op: OpOverload) -> bool:
    """Rule 3."""
    return not rules(op).written and not rules(op).views


class _Result:
    """What is kept in a storage: a result of an op, which autograd may save as it is or a part of which.

    Args:
        tensor: The result of the op.
        kept: The result, once it is kept; None before.
        is_offloaded: Whether the policy moves the result to the host.
    """

    def __init__(self, tensor: Tensor, kept: "KeptTensor", is_offloaded: bool) -> None:
        self.kept = kept
        self.is_offloaded = is_offloaded
        self._is = _identity(tensor)

    def is_same(self, tensor: Tensor) -> bool:
        """Whether a tensor in this storage is the result and was not written to since."""
        return _identity(tensor) == self._is


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    return layout_of(tensor), tensor.storage_offset(), version_of(tensor)


class _Recomputation(DispatchMode):
    """Rule 2. Entered around each recomputation."""

    def __init__(self) -> None:
        super().__init__()
        self._results: dict[OpOverload, list[tuple[Any, Callable[[], Any] | None]]] = {}
        self._calls: Counter[OpOverload] = Counter()

    def note(self, op: OpOverload, args: tuple[Any, ...], results: "Callable[[], Any] | None") -> None:
        """Notes a call of forward, and what gives its results if they are kept."""
        self._results.setdefault(op, []).append((_given(args), results))

    def __enter__(self) -> Self:
        self._calls.clear()
        super().__enter__()
        return self

    def __torch_dispatch__(self, op: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Gives the results of an op that are kept, else runs it."""
        number = self._calls[op]
        self._calls[op] += 1
        noted = self._results.get(op, [])[number : number + 1]
        for given, results in noted:
            if results is not None and given == _given(args):
                return results()
        return op(*args, **(kwargs or {}))


def _given(args: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """What tells calls of an op apart, as far as it is known below autograd."""
    return [(tensor.dtype, tensor.shape) for tensor in tensors_in(args)]


class KeptTensor:
    """A tensor that stays on the trainer. Call it to have it back.

    Args:
        tensor: The detached tensor to keep.
        version: The version counter that it must still have, None for any.
        error: What to raise where it has another. Without it the RuntimeError of torch's selective checkpointing.

    Attributes:
        digest: The `saved_digest` of what it must hold; empty for a kind of tensor that has none.
    """

    def __init__(
        self,
        tensor: Tensor,
        version: int | None,
        error: Callable[[Tensor], Exception] = lambda _: RuntimeError(MUTATED),
    ) -> None:
        self._packed: Any = tensor
        self._version = version
        self._error = error
        self.digest: Digest = b""
        self._unpacks: list[Callable[[Any], Tensor]] = []
        self._is_of_others = False

    def offload(self) -> None:
        """Moves it to the host. A copy also where it is there already, so that the device's memory is free."""
        tensor: Tensor = self._packed
        host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        if host.stride() == tensor.stride() and not tensor.is_conj() and not tensor.is_neg():
            host.copy_(tensor)
        else:  # expanded, or with gaps: it comes back with the strides it had
            host = copy_exact(tensor, device="cpu")
        self._packed = host
        device = tensor.device
        self._unpacks.append(lambda held: held if held.device == device else copy_exact(held, device=device))

    def pack(self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
        """Passes the tensor to the user's saved-tensor hooks, which may return another one."""
        self._is_of_others = True
        self._packed = pack(self._packed)
        self._unpacks.append(unpack)

    def __call__(self) -> Tensor:
        """The tensor. Raises an error if it was written to."""
        tensor: Tensor = self._packed
        if not self._unpacks and self._version is not None and version_of(tensor) != self._version:
            raise self._error(tensor)
        for unpack in reversed(self._unpacks):
            tensor = unpack(tensor)
        return tensor

    @property
    def is_of_others(self) -> bool:
        """Whether the user's saved-tensor hooks return the tensor, and may have changed it."""
        return self._is_of_others

    def is_intact(self, tensor: Tensor) -> bool:
        """Whether a tensor that a call returned holds what it must, if that can be told."""
        if self.is_of_others or not self.digest:
            return True
        layout = layout_of(tensor)
        return saved_digest(layout, content_digest(tensor, layout)) == read(self.digest)


class _SharedTensor(KeptTensor):
    """What another keeps already.

    Args:
        kept: By which it is given back.
    """

    def __init__(self, kept: KeptTensor) -> None:
        self._kept = kept
        self.digest: Digest = b""

    @property
    def is_of_others(self) -> bool:
        """As that of the other."""
        return self._kept.is_of_others

    def __call__(self) -> Tensor:
        """The tensor. Raises as the other does."""
        return self._kept()
