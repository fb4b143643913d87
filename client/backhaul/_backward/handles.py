"""The handles that stand in autograd's graph for the saved tensors of a checkpointed call."""

import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from backhaul._backward import local_recompute
from backhaul._backward.value_check import CheckpointError
from backhaul._observe.call_log import CallLog
from backhaul._torch_api.options import Options
from backhaul._torch_api.selective import KeptTensor
from backhaul_runtime.errors import NotRemoteError
from backhaul_runtime.program.names import names
from backhaul_runtime.program.program import Program
from backhaul_runtime.record.recording import Recording
from backhaul_runtime.replay.backward_watch import WRITES
from backhaul_runtime.tensors.digest import content_digest, saved_digest
from backhaul_runtime.tensors.layout import layout_of
from backhaul_runtime.torch_internals.pre_dispatch import after_backward, unobserved
from backhaul_runtime.torch_internals.private import is_plain_backward
from backhaul_runtime.torch_internals.storages import storage_key

CPU = torch.device("cpu")


def not_remote(name: str, reason: str) -> NotRemoteError:
    """Returns the error for a segment of this name that no worker would recompute, for this reason."""
    return NotRemoteError(
        f"segment {name} would not be recomputed on a worker: {reason}. Remove the cause, or drop strict=True to let "
        "the trainer recompute it",
        segment=name,
        reason=reason,
    )


@dataclass(frozen=True, slots=True, eq=False)
class CheckpointedCall:
    """A checkpointed call. It is created before the call runs.

    Attributes:
        name: The name of the function or module, for messages and reports.
        log: Counts what happens to the call.
        options: The options of the call.
        recording: The recording of the call. It grows during the call and does not change afterwards.
        local_reason: Why only the trainer can recompute the call, if that is known before the call; else empty.
        inside_reason: Why the graph of the segment's inside must stay, if options or regions decide that; else empty.
        device: The device that the call computes on, as far as its arguments show it.
    """

    name: str
    log: CallLog
    options: Options
    recording: Recording
    local_reason: str = ""
    inside_reason: str = ""
    device: torch.device = CPU

    def check_strict(self, reason: str, cause: Exception | None = None) -> None:
        """Raises NotRemoteError under `strict`. Call it before the trainer recomputes the segment or decides to.

        Args:
            reason: Why no worker recomputes the segment.
            cause: The unexpected exception behind the reason, from which the error is raised.
        """
        if self.options.strict:
            raise not_remote(self.name, reason) from cause

    def check_backward(self) -> None:
        """Raises RuntimeError for a backward that the reentrant form of torch's checkpoint rejects."""
        if self.options.use_reentrant and not is_plain_backward():
            raise RuntimeError(
                "When use_reentrant=True, torch.utils.checkpoint is incompatible with .grad() or passing an `inputs` "
                "parameter to .backward(). To resolve this error, you can either set use_reentrant=False, or call "
                ".backward() without passing the `inputs` argument."
            )

    def check_kept(self, handle: "Handle") -> Tensor:
        """Returns the tensor that a handle keeps.

        Raises CheckpointError if its bytes have changed since it was saved.
        """
        assert handle.kept is not None
        tensor = handle.kept()
        if not handle.kept.is_intact(tensor):
            raise CheckpointError(
                f"segment {self.name}: saved tensor {handle.index} was kept on the trainer and was changed between "
                "forward and backward in a way that autograd does not see (NumPy, .data)",
                segment=self.name,
            )
        return tensor


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
        self._lock = threading.RLock()  # guards the RNG generators, which a replay inside the call uses

    def add(self, index: int) -> Handle:
        """Creates a handle for a tensor that autograd saves. It replaces the handle of an op that failed."""
        handle = Handle(self, index)
        self.handles[index] = weakref.ref(handle)
        return handle

    def end_call(self) -> None:
        """Drops everything that belongs to the running call."""
        self._so_far = None

    def unpack_by(self, unpack: Callable[[Handle], Tensor]) -> None:
        """Sets the frame's method for unpacking. The table then keeps the frame alive as long as any handle lives."""
        self._unpack = unpack

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
        saved, layout = self._call.recording.saved[index], layout_of(tensor)
        if saved_digest(layout, content_digest(tensor, layout)) != saved.digest:
            names.deny(saved.op, f"the backward of {saved.op} {WRITES}")
            raise local_recompute.lost_write(self._call.name, [saved.op], "a tensor that outlives the forward")

    def _unpack_early(self, handle: Handle) -> Tensor:
        """Returns a tensor for a backward inside the call, or for a graph that outlived a failed call."""
        # Without `check_backward`: the rule of torch's reentrant form is about backward through the segment's outputs.
        if handle.kept is not None:
            return self._call.check_kept(handle)
        if self._so_far is None:
            raise RuntimeError(f"segment {self._call.name}: the call raised, so nothing of it can be recomputed")
        with self._lock, unobserved():  # else the recorder would note the replay
            return local_recompute.saved_before(self._call.name, self._so_far(), self._call.recording, handle.index)


def awaited(handles: Handles) -> list[int]:
    """What backward can ask for that has to be recomputed, in the order in which it was saved."""
    alive = [reference() for reference in handles.values()]
    return [handle.index for handle in alive if handle is not None and handle.kept is None]
