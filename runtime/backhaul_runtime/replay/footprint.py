"""Measures what a replay holds, and from it what its backward will take.

NOTE [Footprint]
torch can't say how much memory an op's backward takes, so storages are counted:
1. While it replays: results until their last use, outputs, and what autograd saved.
2. Backward goes through the nodes from the last to the first. What only later nodes saved is gone by then.
3. A result has one gradient of its size, from its last use back to the node that made it. Each further use takes as
   much again while it is added, a view as much as what it is a view of.
4. Each use of a source has a gradient of its size, until the end.
Gradients that backward starts from are not counted: they are somebody else's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from backhaul_runtime.replay.schedule import Footprint
from backhaul_runtime.torch_internals.storages import storage_key


@dataclass(slots=True)
class _Storage:
    size_bytes: int
    made_by: int
    reference: StorageWeakRef  # keeps its address from being used again
    is_source: bool = False
    requires_grad: bool = False
    uses: list[int] = field(default_factory=list)
    saved_by: int | None = None
    is_output: bool = False

    @property
    def last_use(self) -> int:
        return max(self.uses, default=self.made_by)


class FootprintMeter:
    """Of one replay. Told of its nodes in order.

    Args:
        sources: As the nodes will read them.
    """

    def __init__(self, sources: Sequence[Tensor]) -> None:
        self._storages: dict[int, _Storage] = {}
        self._views: list[tuple[int, _Storage]] = []
        self._node = -1
        for source in sources:
            storage = self._storage(source)
            storage.is_source = True
            storage.requires_grad |= source.requires_grad
        self._node = 0

    def saved(self, tensor: Tensor) -> None:
        """Autograd saves a tensor for the node that runs."""
        storage = self._storage(tensor)
        if storage.saved_by is None:
            storage.saved_by = self._node

    def ran(self, read: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        """A node ran. The next one follows."""
        for tensor in read:
            self._storage(tensor).uses.append(self._node)
        for tensor in results:
            storage = self._storage(tensor)
            storage.requires_grad |= tensor.requires_grad
            if storage.made_by != self._node and storage.requires_grad:
                self._views.append((self._node, storage))
        self._node += 1

    def footprint(self, outputs: Sequence[Tensor]) -> Footprint:
        """Of the replay that has just ended."""
        for output in outputs:
            self._storage(output).is_output = True
        own = [storage for storage in self._storages.values() if not storage.is_source]
        end = self._node - 1
        ready_bytes = sum(storage.size_bytes for storage in own if _is_kept(storage))
        replay, backward = _Levels(self._node), _Levels(self._node)
        for storage in own:
            size = storage.size_bytes
            replay.add(storage.made_by, end if _is_kept(storage) else storage.last_use, size)
            if _is_kept(storage):
                backward.add(0 if storage.is_output else storage.saved_by or 0, end, size)
            if storage.requires_grad and (storage.uses or not storage.is_output):
                backward.add(storage.made_by, storage.last_use, size)
                for use in storage.uses:
                    backward.add(use, use, size if use < storage.last_use else 0)
        for source in self._storages.values():
            for use in source.uses if source.is_source and source.requires_grad else ():
                backward.add(0, use, source.size_bytes)
        for node, viewed in self._views:
            backward.add(node, node, viewed.size_bytes)
        return Footprint(replay.most, ready_bytes, max(backward.most, ready_bytes))

    def _storage(self, tensor: Tensor) -> _Storage:
        key = storage_key(tensor)
        known = self._storages.get(key)
        if known is None:
            storage = tensor.untyped_storage()
            reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            known = self._storages[key] = _Storage(storage.nbytes(), self._node, reference)
        return known


def _is_kept(storage: _Storage) -> bool:
    return storage.is_output or storage.saved_by is not None


class _Levels:
    """How many bytes are there at each node."""

    def __init__(self, nodes: int) -> None:
        self._changes = [0] * (nodes + 1)

    def add(self, first: int, last: int, size_bytes: int) -> None:
        self._changes[first] += size_bytes
        self._changes[last + 1] -= size_bytes

    @property
    def most(self) -> int:
        return max(accumulate(self._changes), default=0)
