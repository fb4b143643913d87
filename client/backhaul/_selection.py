"""Selective checkpointing: what a policy chooses stays on the trainer, the rest is recomputed.

A policy sees the ops below autograd and says of each whether its results are kept. Autograd saves tensors in their
memory later; those stay here, so that they need neither be recomputed for nor sent.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    SelectiveCheckpointContext,
    _CachedTorchDispatchMode,
    _CachingTorchDispatchMode,
)

from backhaul_runtime.dispatch_mode import DispatchMode
from backhaul_runtime.layout import copy_exact, unsupported_reason
from backhaul_runtime.op_rules import tensors_in
from backhaul_runtime.recording import version_of
from backhaul_runtime.storages import StorageLedger, storage_key

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
        is_mutated: Whether, against the rule, the function wrote to what was chosen. Known once it has ended.
    """

    def __init__(self, policy: Callable[..., Any], *, may_change: bool, hooks: Hooks | None) -> None:
        super().__init__()
        self._policy = policy
        self._may_change = may_change
        self._hooks = hooks
        self._seen = StorageLedger()  # so that no storage takes the place of another
        self._chosen: dict[int, bool] = {}
        self._versions: list[tuple[Tensor, int]] = []
        self._is_keeping = False
        self.is_mutated = False

    @classmethod
    def of(cls, first: Any, second: Any, hooks: Hooks | None) -> "Selection | None":
        """What stands behind contexts that torch's `create_selective_checkpoint_contexts` made, None for others."""
        if type(first) is not _CachingTorchDispatchMode or type(second) is not _CachedTorchDispatchMode:
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
        if choice in _KEPT or choice in _OFFLOADED:
            for tensor in tensors_in(returned):
                if unsupported_reason(tensor) is not None:
                    continue  # without a storage there is nothing to know it by: it is recomputed
                self._seen.add(tensor)
                self._chosen[storage_key(tensor)] = choice in _OFFLOADED
                if not self._may_change:
                    self._versions.append((_alias(tensor), version_of(tensor)))
        return returned

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self.is_mutated = any(version_of(tensor) != version for tensor, version in self._versions)
        self._versions.clear()

    def keep(self, tensor: Tensor) -> "Kept | None":
        """Keeps a tensor that autograd saves, if the policy chose the memory it lies in. Returns what gives it back."""
        is_offloaded = None if unsupported_reason(tensor) else self._chosen.get(storage_key(tensor))
        if is_offloaded is None:
            return None
        kept = Kept(tensor.detach(), None if self._may_change else version_of(tensor))
        self._is_keeping = True  # what keeping takes is no op of the function's
        try:
            if is_offloaded:
                kept.offload()
            if self._hooks is not None:
                kept.pack(*self._hooks)
        finally:
            self._is_keeping = False
        return kept


def _alias(tensor: Tensor) -> Tensor:
    """A tensor with the memory and the version counter of another. Below autograd `detach` gives one of its own."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


class Kept:
    """A tensor that stays on the trainer. Call it to have it back.

    Args:
        tensor: Detached.
        version: It must still have; None for any.

    Attributes:
        is_checked: Whether it must hold what autograd saved.
    """

    def __init__(self, tensor: Tensor, version: int | None) -> None:
        self._packed: Any = tensor
        self._version = version
        self.is_checked = True
        self._unpacks: list[Callable[[Any], Tensor]] = []

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
        """Hands it to the hooks of somebody else, who may well give back another."""
        self.is_checked = False
        self._packed = pack(self._packed)
        self._unpacks.append(unpack)

    def __call__(self) -> Tensor:
        """The tensor. Raises RuntimeError, in torch's words, if it was written to."""
        found: Tensor = self._packed
        if not self._unpacks and self._version is not None and version_of(found) != self._version:
            raise RuntimeError(MUTATED)
        for unpack in reversed(self._unpacks):
            found = unpack(found)
        return found
