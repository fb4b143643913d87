"""What the trainer keeps of a segment between forward and backward.

Autograd holds the frame, and nothing else does: a graft's node, or the handles that stand where saved tensors would be.
So a frame lives as long as somebody could need its segment, and its end releases everything remote.
"""

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from backhaul import _local
from backhaul._report import Decision, SegmentLog
from backhaul._value_check import CheckpointError, check_values
from backhaul_runtime import ambient
from backhaul_runtime.digest import content_digest, saved_digest
from backhaul_runtime.errors import BackhaulError, NotRemoteError, WorkerError, WorkerLostError
from backhaul_runtime.layout import Layout, layout_of
from backhaul_runtime.program import Program
from backhaul_runtime.recorder import Recording, SavedTensor
from backhaul_runtime.replay import Contribution

if TYPE_CHECKING:
    from backhaul._local import Call


class RemoteSegment(Protocol):
    """A segment that a worker holds. Each call waits, within bounds, and raises WorkerLostError or WorkerError."""

    def backward(self, gradients: Mapping[int, Tensor], state: ambient.State) -> tuple[list[bytes], list[Contribution]]:
        """Digests of what the replay saved, and the contributions."""

    def recompute(self, positions: Sequence[int]) -> tuple[int, dict[int, Tensor]]:
        """How many tensors the replay saved, and those asked for."""


class Handle:
    """Stands in autograd's graph where a saved tensor would."""

    __slots__ = ("__weakref__", "frame", "index")

    def __init__(self, frame: "Frame", index: int) -> None:
        self.frame = frame
        self.index = index


@dataclass(eq=False)
class Frame:
    """A segment between forward and backward.

    Attributes:
        name: What was called, for people.
        log: Where what happens to it is counted.
        strict: Raise rather than recompute on the trainer.
        recording: From forward.
        program: None where the call could not be recorded.
        call: The call itself, only where there is no program.
        remote: The worker's side, None where no worker has it.
        local_reason: Why the trainer recomputes it, where that is settled.
    """

    name: str
    log: SegmentLog
    strict: bool
    recording: Recording = field(default_factory=Recording)
    program: Program | None = None
    call: "Call | None" = None
    remote: RemoteSegment | None = None
    local_reason: str = ""
    _handles: list[weakref.ref[Handle]] = field(default_factory=list)
    _fetched: dict[int, Tensor] = field(default_factory=dict)
    _task: int = -1

    def handle(self) -> Handle:
        """A handle for the next tensor that autograd saves."""
        handle = Handle(self, len(self._handles))
        self._handles.append(weakref.ref(handle))
        return handle

    def gradients(self, gradients: Mapping[int, Tensor]) -> list[Contribution]:
        """The segment's backward, on a worker if one can. Called by autograd, in the thread that runs backward.

        Args:
            gradients: Of the program's outputs, by position. Not kept.
        """
        assert self.program is not None
        if self.remote is not None:
            state = ambient.capture()
            started = perf_counter()
            try:
                digests, contributions = self.remote.backward(gradients, state)
                check_values(self.name, "on the worker", self.recording.saved, digests)
            except (WorkerError, WorkerLostError, CheckpointError) as error:
                self._lost(error)
            else:
                self.log.add(Decision.GRADIENTS, perf_counter() - started)
                return contributions
        started = self._begin_local()
        contributions = _local.gradients_here(self.name, self.program, self.recording, gradients)
        self.log.add(Decision.TRAINER, perf_counter() - started)
        return contributions

    def unpack(self, index: int) -> Tensor:
        """A tensor that autograd saved. The first of a backward fetches all that are still needed."""
        task = torch._C._current_graph_task_id()
        if task != self._task or index not in self._fetched:
            self._fetched.clear()
            wanted = [i for i, handle in enumerate(self._handles) if handle() is not None]
            self._fetched = self._fetch(wanted)
            self._task = task
        return self._fetched.pop(index)

    def _fetch(self, wanted: Sequence[int]) -> dict[int, Tensor]:
        if self.remote is not None:
            started = perf_counter()
            try:
                found = self._fetch_remote(wanted)
            except (WorkerError, WorkerLostError, CheckpointError) as error:
                self._lost(error)
            else:
                self.log.add(Decision.ACTIVATIONS, perf_counter() - started)
                return found
        started = self._begin_local()
        if self.program is not None:
            found = _local.saved_here(self.name, self.program, self.recording, wanted)
        else:
            assert self.call is not None
            found = self.call.saved_again(self.name, self.recording)
        self.log.add(Decision.TRAINER, perf_counter() - started)
        return found

    def _fetch_remote(self, wanted: Sequence[int]) -> dict[int, Tensor]:
        assert self.remote is not None
        saved = self.recording.saved
        found = {index: here for index in wanted if (here := self._present(saved[index])) is not None}
        # Backward unpacks what was saved last first.
        missing = [index for index in reversed(wanted) if index not in found]
        count, fetched = self.remote.recompute(missing) if missing else (len(saved), {})
        digests: list[bytes | None] = [None] * count
        for index, tensor in fetched.items():
            layout = layout_of(tensor)
            digests[index] = saved_digest(layout, content_digest(tensor, layout))
        check_values(self.name, "on the worker", saved, digests)
        return found | fetched

    def _present(self, saved: SavedTensor) -> Tensor | None:
        """A saved tensor that lies in a parameter or in a copied argument need not travel, if it is unchanged."""
        if saved.source < 0:
            return None
        source = self.recording.sources[saved.source]
        start = saved.offset - source.offset
        span = _elements(saved.layout)
        if source.is_written or start < 0 or start + span > _elements(source.layout):
            return None
        value = source.value
        view = torch.empty(0, dtype=saved.layout.dtype, device=value.device)
        view.set_(value.untyped_storage(), value.storage_offset() + start, saved.layout.shape, saved.layout.strides)  # type: ignore[call-overload]
        layout = layout_of(view)
        return view if saved_digest(layout, content_digest(view, layout)) == saved.digest else None

    def _lost(self, error: BackhaulError) -> None:
        self.remote = None
        self.local_reason = error.message.splitlines()[0]
        self.log.fallback(self.local_reason)

    def stays_local(self, reason: str) -> None:
        """Settles in forward that the trainer recomputes this segment. Raises NotRemoteError under `strict`."""
        self.local_reason = reason
        self._check_strict()
        self.log.on_trainer(reason)

    def _begin_local(self) -> float:
        self._check_strict()
        return perf_counter()

    def _check_strict(self) -> None:
        if self.strict:
            raise NotRemoteError(
                f"segment {self.name} would be recomputed on the trainer: {self.local_reason}. Mend that, or drop "
                "strict=True to let the trainer do it",
                segment=self.name,
                reason=self.local_reason,
            )


def _elements(layout: Layout) -> int:
    return layout.span_bytes // layout.dtype.itemsize

