"""Measures the bytes that a replay holds, and estimates from its storages the bytes that its backward will take.

NOTE [Footprint]
torch can't say how much memory an op's backward takes. So the meter adds up storages, by these rules:
1. The replay holds results until their last use, outputs, and saved tensors until its end.
2. Backward visits the nodes from the last to the first. When it reaches a node, the tensors that only later nodes saved
   are freed.
3. A result has one gradient of its size, from its last use back to the node that made it. Each further use takes the
   same size again while its contribution is added. A view takes the size of the storage that it is a view of.
4. Each use of a source has a gradient of the source's size, which is held until backward ends.
5. The backward of an op holds a temporary tensor of the size of its largest result. That of `square` takes the most:
   x to the power of 1, twice that, and the gradient.
Gradients that backward starts from are not counted, because they belong to the request.
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
    reference: StorageWeakRef  # prevents that torch reuses the storage's address, under which the meter knows it
    is_source: bool = False
    requires_grad: bool = False
    uses: list[int] = field(default_factory=list)
    saved_by: int | None = None
    is_output: bool = False

    @property
    def last_use(self) -> int:
        return max(self.uses, default=self.made_by)


class FootprintMeter:
    """Measures one replay. The replay reports each saved tensor and each node, in the order in which they happen.

    Args:
        sources: The sources as the nodes will read them, copies of written ones included.
    """

    def __init__(self, sources: Sequence[Tensor]) -> None:
        self._storages: dict[int, _Storage] = {}
        self._views: list[tuple[int, _Storage]] = []
        self._temporary_bytes: list[int] = []  # by node
        self._node = -1
        for source in sources:
            storage = self._storage(source)
            storage.is_source = True
            storage.requires_grad |= source.requires_grad
        self._node = 0

    def saved(self, tensor: Tensor) -> None:
        """Notes that autograd saved a tensor for the node that runs at present."""
        storage = self._storage(tensor)
        if storage.saved_by is None:
            storage.saved_by = self._node

    def ran(self, read: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        """Notes that a node has run, with the tensors that it read and its results. The next node runs from now on."""
        for tensor in read:
            self._storage(tensor).uses.append(self._node)
        temporary_bytes = 0
        for tensor in results:
            storage = self._storage(tensor)
            storage.requires_grad |= tensor.requires_grad
            if storage.made_by != self._node and storage.requires_grad:
                self._views.append((self._node, storage))
            elif storage.requires_grad:
                temporary_bytes = max(temporary_bytes, storage.size_bytes)
        self._temporary_bytes.append(temporary_bytes)
        self._node += 1

    def footprint(self, outputs: Sequence[Tensor]) -> Footprint:
        """Returns the footprint of the replay, which has just ended. Call it once.

        Args:
            outputs: The outputs of the replay's program.
        """
        for output in outputs:
            self._storage(output).is_output = True
        own = [storage for storage in self._storages.values() if not storage.is_source]
        end = self._node - 1
        ready_bytes = sum(storage.size_bytes for storage in own if _outlives_replay(storage))
        replay, backward = _Levels(self._node), _Levels(self._node)
        for storage in own:
            size = storage.size_bytes
            # What autograd saves, and outputs, live until backward; all else until the last node that reads it.
            replay.add(storage.made_by, end if _outlives_replay(storage) else storage.last_use, size)
            # The caller holds an output to the end, autograd frees the rest at the node that saved it.
            if _outlives_replay(storage):
                backward.add(0 if storage.is_output else storage.saved_by or 0, end, size)
            # Its gradient exists from its last use, which backward reaches first, until the node that made it.
            # That of an output without a use belongs to the request.
            if storage.requires_grad and (storage.uses or not storage.is_output):
                backward.add(storage.made_by, storage.last_use, size)
                # Each use but the last makes a contribution of its own beside the sum.
                for use in storage.uses:
                    backward.add(use, use, size if use < storage.last_use else 0)
        # Contributions to sources are not added up: each lives until the answer is sent.
        for source in self._storages.values():
            for use in source.uses if source.is_source and source.requires_grad else ():
                backward.add(0, use, source.size_bytes)
        for node, viewed in self._views:  # the backward of a view fills a gradient of the size of its base
            backward.add(node, node, viewed.size_bytes)
        for node, temporary_bytes in enumerate(self._temporary_bytes):
            backward.add(node, node, temporary_bytes)
        return Footprint(replay.most, ready_bytes, max(backward.most, ready_bytes))

    def _storage(self, tensor: Tensor) -> _Storage:
        key = storage_key(tensor)
        known = self._storages.get(key)
        if known is None:
            storage = tensor.untyped_storage()
            reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            known = self._storages[key] = _Storage(storage.nbytes(), self._node, reference)
        return known


def _outlives_replay(storage: _Storage) -> bool:
    return storage.is_output or storage.saved_by is not None


class _Levels:
    """Adds up the bytes that are held at each node."""

    def __init__(self, nodes: int) -> None:
        self._changes = [0] * (nodes + 1)

    def add(self, first: int, last: int, size_bytes: int) -> None:
        self._changes[first] += size_bytes
        self._changes[last + 1] -= size_bytes

    @property
    def most(self) -> int:
        return max(accumulate(self._changes), default=0)
