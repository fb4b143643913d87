"""Selective checkpointing: the trainer keeps what a policy chooses, and the rest is recomputed.

NOTE [Selection]
1. A policy sees the ops below autograd and decides for each whether its results are kept. Tensors in the memory of kept
   results that autograd saves later are kept too: they are neither recomputed nor sent.
2. In a recomputation on the trainer, an op with kept results returns these and does not run again. It is identified by
   its position among the calls of that op, and by its arguments. The values are checked as in any recomputation.
3. Ops that return views or write to their arguments run again, because their results have no memory of their own.
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
from backhaul_runtime.tensors.digest import digest_of_tensor
from backhaul_runtime.tensors.layout import copy_exact, layout_of, unsupported_reason
from backhaul_runtime.torch_internals.dispatch_mode import DispatchMode
from backhaul_runtime.torch_internals.private import OpOverload, alias_of, is_selective_pair, pytree, version_of
from backhaul_runtime.torch_internals.storages import StorageLedger, storage_key

_KEPT = {True, CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE}
_OFFLOADED = {CheckpointPolicy.MUST_CPU_OFFLOAD, CheckpointPolicy.PREFER_CPU_OFFLOAD}
MUTATED = "Tensor cached during selective activation checkpoint has been mutated"
Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


class Selection(DispatchMode):
    """The dispatch mode that asks the policy. Enter it around the call.

    Args:
        policy: A policy as `create_selective_checkpoint_contexts` accepts it; it may return bools.
        may_change: Whether the function may write to kept tensors.
        hooks: Saved-tensor hooks that kept tensors pass through; None for none.

    Attributes:
        again: The mode for a recomputation on the trainer, in which ops with kept results do not run again.
        is_mutated: Whether the function wrote to a kept tensor against the rule. Known when the call has ended.
    """

    def __init__(self, policy: Callable[..., Any], *, may_change: bool, hooks: Hooks | None) -> None:
        super().__init__()
        self._policy = policy
        self._may_change = may_change
        self._hooks = hooks
        self._seen = StorageLedger()  # so that no other storage gets the address of a known one
        self._results: dict[int, _Result] = {}
        self._versions: list[tuple[Tensor, int]] = []
        self._is_keeping = False
        self.again = _Recomputation()
        self.is_mutated = False

    @classmethod
    def of(cls, first: Any, second: Any, hooks: Hooks | None) -> "Selection | None":
        """Returns the selection behind contexts of torch's `create_selective_checkpoint_contexts`, None for others."""
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
        """Keeps the results of an op. Returns a function that returns them; None for tensors that cannot be kept."""
        leaves, spec = pytree.tree_flatten(returned)
        tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}
        if any(map(unsupported_reason, tensors.values())):
            return None  # without a storage it cannot be identified, so it is recomputed
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
        """Keeps a tensor that autograd saves, if the policy chose the memory that it lies in; else returns None."""
        result = None if unsupported_reason(tensor) else self._results.get(storage_key(tensor))
        if result is None:
            return None
        if result.is_same(tensor):
            return _SharedTensor(result.kept)
        return self._kept(tensor.detach(), is_offloaded=result.is_offloaded)

    def _kept(self, tensor: Tensor, *, is_offloaded: bool) -> "KeptTensor":
        kept = KeptTensor(tensor, None if self._may_change else version_of(tensor))
        self._is_keeping = True  # ops of our own must not be asked about
        try:
            if is_offloaded:
                kept.offload()
            if self._hooks is not None:
                kept.pack(*self._hooks)
        finally:
            self._is_keeping = False
        return kept


def _stands_alone(op: OpOverload) -> bool:
    """Whether the results of an op have memory of their own (Rule 3)."""
    return not rules(op).written and not rules(op).views


class _Result:
    """The kept result in a storage. Autograd may save all of it or a part.

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
        """Whether a tensor in this storage is the unchanged result."""
        return _identity(tensor) == self._is


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    return layout_of(tensor), tensor.storage_offset(), version_of(tensor)


class _Recomputation(DispatchMode):
    """The mode of a recomputation on the trainer (Rule 2)."""

    def __init__(self) -> None:
        super().__init__()
        self._results: dict[OpOverload, list[tuple[Any, Callable[[], Any] | None]]] = {}
        self._calls: Counter[OpOverload] = Counter()

    def note(self, op: OpOverload, args: tuple[Any, ...], results: "Callable[[], Any] | None") -> None:
        """Notes a call in forward, and the function that returns its results if they are kept."""
        self._results.setdefault(op, []).append((_given(args), results))

    def __enter__(self) -> Self:
        self._calls.clear()
        super().__enter__()
        return self

    def __torch_dispatch__(self, op: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Returns the kept results of an op, or runs it."""
        number = self._calls[op]
        self._calls[op] += 1
        noted = self._results.get(op, [])[number : number + 1]
        for given, results in noted:
            if results is not None and given == _given(args):
                return results()
        return op(*args, **(kwargs or {}))


def _given(args: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Returns what identifies a call of an op, as far as it is known below autograd."""
    return [(tensor.dtype, tensor.shape) for tensor in tensors_in(args)]


class KeptTensor:
    """A tensor that stays on the trainer. Calling it returns the tensor.

    Args:
        tensor: The detached tensor to keep.
        version: The version counter that the tensor must still have; None for any.
        error: Returns the error for a tensor of another version, from the tensor and the right version; by default
            torch's RuntimeError of selective checkpointing.

    Attributes:
        digest: The `saved_digest` that the tensor must have; empty for a kind of tensor without one.
    """

    def __init__(
        self,
        tensor: Tensor,
        version: int | None,
        error: Callable[[Tensor, int], Exception] = lambda *_: RuntimeError(MUTATED),
    ) -> None:
        self._packed: Any = tensor
        self._version = version
        self._error = error
        self.digest: Digest = b""
        self._unpacks: list[Callable[[Any], Tensor]] = []
        self._is_of_others = False

    def offload(self) -> None:
        """Moves the tensor to the host, by a copy in any case, so that the memory of the original is freed."""
        tensor: Tensor = self._packed
        host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        if host.stride() == tensor.stride() and not tensor.is_conj() and not tensor.is_neg():
            host.copy_(tensor)
        else:  # expanded or with gaps: the tensor is restored with its strides
            host = copy_exact(tensor, device="cpu")
        self._packed = host
        device = tensor.device
        self._unpacks.append(lambda tensor: tensor if tensor.device == device else copy_exact(tensor, device=device))

    def pack(self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
        """Passes the tensor to the user's saved-tensor hooks, which may return another one."""
        self._is_of_others = True
        self._packed = pack(self._packed)
        self._unpacks.append(unpack)

    def __call__(self) -> Tensor:
        """Returns the tensor. Raises an error if it was written to."""
        tensor: Tensor = self._packed
        if not self._unpacks and self._version is not None and version_of(tensor) != self._version:
            raise self._error(tensor, self._version)
        for unpack in reversed(self._unpacks):
            tensor = unpack(tensor)
        return tensor

    @property
    def is_of_others(self) -> bool:
        """Whether the user's saved-tensor hooks return the tensor and may have changed it."""
        return self._is_of_others

    def is_intact(self, tensor: Tensor) -> bool:
        """Whether a returned tensor has the right contents, as far as that can be checked."""
        if self.is_of_others or not self.digest:
            return True
        return digest_of_tensor(tensor) == read(self.digest)


class _SharedTensor(KeptTensor):
    """A tensor in memory that another kept tensor already holds.

    Args:
        kept: The kept tensor that holds the memory.
    """

    def __init__(self, kept: KeptTensor) -> None:
        self._kept = kept
        self.digest: Digest = b""

    @property
    def is_of_others(self) -> bool:
        """Whether hooks may have changed the tensor, as for the other one."""
        return self._kept.is_of_others

    def __call__(self) -> Tensor:
        """Returns the tensor. Raises the errors of the other one."""
        return self._kept()
