"""The memory that ops make while a call runs."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from backhaul_runtime.errors import Refusal
from backhaul_runtime.program.op_rules import READS_ONLY_SHAPES, OpRules, tensors_in, written_tensors
from backhaul_runtime.record.sources import SourceLedger
from backhaul_runtime.torch_internals.private import identity_of
from backhaul_runtime.torch_internals.storages import StorageLedger, storage_key


class InteriorMemory:
    """The storages that the ops of a call have made. It keeps none of them alive.

    `tensor in interior` says whether an op has returned the tensor's storage.

    Args:
        sources: The sources of the call, whose storages come from outside.
    """

    def __init__(self, sources: SourceLedger) -> None:
        self._sources = sources
        self._returned = StorageLedger()
        self._hidden = StorageLedger()
        self._hidden_bytes: dict[int, int] = {}  # by key, for storages that autograd saves and no op returns
        self._scratch_bytes = 0
        self._unwritten: set[int] = set()

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor in self._returned

    def add_results(self, results: Sequence[Tensor]) -> tuple[int, ...]:
        """Adds the results of an op. Returns for each the bytes of its storage if the op made the storage, else 0."""
        sizes = [0 if self._sources.at(storage_key(r)) else self._returned.add(r) for r in results]
        for result in results:
            self._hidden_bytes.pop(storage_key(result), None)
        return tuple(sizes)

    def is_hidden(self, tensor: Tensor) -> bool:
        """Whether a tensor that autograd saves, and that is in no source, lies in a storage that was not added yet."""
        return tensor not in self._returned and tensor not in self._hidden

    def add_hidden(self, tensor: Tensor) -> None:
        """Adds a tensor that autograd saves and no op has returned so far."""
        self._hidden_bytes[storage_key(tensor)] = self._hidden.add(tensor)

    def note_scratch(self, made_bytes: int) -> None:
        """Notes the bytes that a custom function has made while it ran, of which the largest number counts."""
        self._scratch_bytes = max(self._scratch_bytes, made_bytes)

    @property
    def unreturned_bytes(self) -> int:
        """Bytes that ops make and do not return: what autograd saves, and the most that one custom function makes."""
        return sum(self._hidden_bytes.values()) + self._scratch_bytes

    def add_unwritten(self, results: Iterable[Tensor]) -> None:
        """Notes that the contents of an op's results are undefined."""
        self._unwritten.update(storage_key(result) for result in results if result.numel())

    def note_write(self, tensor: Tensor) -> None:
        """Notes that an op is about to write to a tensor."""
        self._unwritten.discard(storage_key(tensor))

    def has_unwritten(self, tensors: Iterable[Tensor]) -> bool:
        """Whether one of these tensors lies in memory that no op has written."""
        return bool(self._unwritten) and any(storage_key(tensor) in self._unwritten for tensor in tensors)

    def check_reads(self, op_rules: OpRules, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raises Refusal if an op is about to read memory that no op wrote.

        Nothing recorded says what is in it, so a replay would read other values.
        """
        if not self._unwritten or not op_rules.reads_values or op_rules.name in READS_ONLY_SHAPES:
            return
        written = {identity_of(tensor) for tensor in written_tensors(op_rules, args, kwargs)}
        for position, value in enumerate((*args, *kwargs.values())):
            if position in op_rules.views:
                continue
            for item in tensors_in(value):
                if identity_of(item) not in written and storage_key(item) in self._unwritten:
                    raise Refusal(f"{op_rules.name} reads memory that no op wrote (NumPy, or a custom kernel)")
