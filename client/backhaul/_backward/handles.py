"""The handles that stand in autograd's graph for the saved tensors of a checkpointed call."""

import threading
import weakref
from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from backhaul._backward import local_recompute
from backhaul._backward.checkpointed_call import CheckpointedCall
from backhaul._backward.value_check import CheckpointError
from backhaul._torch_api.selective import KeptTensor
from backhaul_runtime.program.custom.names import names
from backhaul_runtime.program.program import Program
from backhaul_runtime.replay.custom.backward_watch import WRITES
from backhaul_runtime.tensors.digest import digest_of_tensor
from backhaul_runtime.torch_internals.pre_dispatch import after_backward, unobserved
from backhaul_runtime.torch_internals.storages import storage_key


class Handle:
    """Stands in autograd's graph where a saved tensor would.

    Attributes:
        table: The table of all handles of the call. It leads to the frame, so the handle keeps the frame alive.
        index: The position of the saved tensor among those of the call.
        kept: The tensor, if it stays on the trainer.
        storage: The storage of the saved tensor, if a custom function saved it, whose backward may write to it.
    """

    __slots__ = ("__weakref__", "index", "kept", "storage", "table")

    def __init__(self, table: "HandleTable", index: int) -> None:
        self.table = table
        self.index = index
        self.kept: KeptTensor | None = None
        self.storage: StorageWeakRef | None = None

    def kept_tensor(self, segment: str) -> Tensor:
        """Returns the tensor that stays on the trainer.

        Args:
            segment: The name of the segment, for the error.

        Raises:
            CheckpointError: The tensor's bytes have changed since it was saved.
        """
        assert self.kept is not None
        tensor = self.kept()
        if not self.kept.is_intact(tensor):
            raise CheckpointError(
                f"segment {segment}: saved tensor {self.index} was kept on the trainer and was changed between forward "
                "and backward in a way that autograd does not see (NumPy, .data)",
                segment=segment,
            )
        return tensor


Handles = Mapping[int, weakref.ref[Handle]]
"""The handles of a call by index. The references are weak, because autograd's graph decides how long a handle lives."""


class HandleTable:
    """Creates the handles of a call. They unpack from the program so far during the call, and through its frame later.

    A frame has only weak references to the handles and none to the table, otherwise both would keep each other alive.

    Args:
        call: The call whose saved tensors these are.
        so_far: Returns the program recorded so far. It is dropped when the call has ended.

    Attributes:
        handles: Weak references to the handles by index; some may be dead.
    """

    def __init__(self, call: CheckpointedCall, so_far: Callable[[], Program]) -> None:
        self.handles: dict[int, weakref.ref[Handle]] = {}
        self._call = call
        self._so_far: Callable[[], Program] | None = so_far
        self._unpack: Callable[[Handle], Tensor] | None = None  # while None, `_unpack_early` does it
        self._by_position: dict[int, Handle] = {}
        self._lock = threading.RLock()  # guards the RNG generators, which a replay inside the call uses

    def add(self, index: int) -> Handle:
        """Creates a handle for a tensor that autograd saves. It replaces the handle of an op that failed."""
        handle = Handle(self, index)
        self.handles[index] = weakref.ref(handle)
        return handle

    def hold(self, index: int) -> Handle:
        """Returns the handle of a tensor that autograd has by its position. It lives as long as the table."""
        if index not in self._by_position:
            self._by_position[index] = self.add(index)
        return self._by_position[index]

    def end_call(self) -> None:
        """Drops everything that belongs to the running call."""
        self._so_far = None

    def unpack_by(self, unpack: Callable[[Handle], Tensor]) -> None:
        """Sets the frame's method for unpacking. The table then keeps the frame alive as long as any handle lives."""
        self._unpack = unpack

    def unpack_packed(self, packed: int | Handle | Tensor) -> Tensor:
        """The unpack hook of a call that gives autograd positions in the place of most handles."""
        if isinstance(packed, Tensor):
            return packed
        return self.unpack(self.hold(packed) if isinstance(packed, int) else packed)

    def unpack(self, handle: Handle) -> Tensor:
        """Returns a tensor that autograd saved. Any thread that runs backward may call it."""
        tensor = self._unpack_early(handle) if self._unpack is None else self._unpack(handle)
        if handle.storage is not None:
            after_backward(partial(self._check_written, handle.index, handle.storage, tensor))
        return tensor

    def _check_written(self, index: int, storage: StorageWeakRef, tensor: Tensor) -> None:
        """Raises ReplayError if a custom backward has written to a copy while the tensor that it saved still exists.

        Whoever has that tensor would see the write without checkpointing. If nobody has it, nobody misses the write.
        """
        if storage.expired() or storage.cdata == storage_key(tensor):  # type: ignore[no-untyped-call]
            return
        saved = self._call.recording.saved[index]
        if digest_of_tensor(tensor) != saved.digest:
            names.deny(saved.op, f"the backward of {saved.op} {WRITES}")
            raise local_recompute.lost_write(self._call.name, [saved.op], "a tensor that outlives the forward")

    def _unpack_early(self, handle: Handle) -> Tensor:
        """Returns a tensor for a backward inside the call, or for a graph that outlived a failed call."""
        # Without `check_backward`: the rule of torch's reentrant form is about backward through the segment's outputs.
        if handle.kept is not None:
            return handle.kept_tensor(self._call.name)
        if self._so_far is None:
            raise RuntimeError(f"segment {self._call.name}: the call raised, so nothing of it can be recomputed")
        with self._lock, unobserved():  # else the recorder would note the replay
            return local_recompute.saved_before(self._call.name, self._so_far(), self._call.recording, handle.index)


def awaited(handles: Handles) -> list[int]:
    """What backward can ask for that has to be recomputed, in the order in which it was saved."""
    alive = [reference() for reference in handles.values()]
    return [handle.index for handle in alive if handle is not None and handle.kept is None]
