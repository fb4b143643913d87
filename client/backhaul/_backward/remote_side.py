"""What a frame expects of a segment that a worker stores.

`_worker_client` implements the two protocols, each once. They are here because its layer is above that of frames.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from backhaul._backward.recheck import Rechecks
from backhaul._backward.value_check import Recomputed
from backhaul_runtime.replay.replay import Contribution
from backhaul_runtime.tensors.layout import Layout
from backhaul_runtime.torch_internals import ambient_state


@dataclass(frozen=True, slots=True)
class StoredGradient:
    """A gradient that a worker has computed and stores, by its address."""

    address: bytes


class RemoteAnswer(NamedTuple):
    """The answer of a worker to a backward.

    Attributes:
        compared: The digests of what the replay saved, or of what it returned.
        contributions: The contributions, in order. Those that were not sent are None.
        stored: The gradients of sources that the worker stores for the backwards of predecessors, by source.
        commit: Call it once the value check has passed, with the number of the block's round. Returns the sources whose
            gradients stay on the worker, which count only after that call.
        took_s: Seconds from the request to the answer. Before the request the device computes the gradient that it
            starts from, and the worker does not take that time.
        outputs: The values of the program's outputs, if they were asked for.
        contribution_digests: The digest of each contribution as the worker has computed it, also of those that stay
            there; empty for none. No digests unless outputs were asked for.
    """

    compared: Recomputed
    contributions: list[Contribution]
    stored: Mapping[int, StoredGradient]
    commit: Callable[[int], set[int]]
    took_s: float
    outputs: Sequence[Tensor] = ()
    contribution_digests: Sequence[bytes] = ()


class RemoteSegment(Protocol):
    """A segment that a worker stores. Its methods wait within deadlines, and raise WorkerLostError or WorkerError.

    Attributes:
        rechecks: What the session rechecks; None if it rechecks nothing.
    """

    rechecks: Rechecks | None

    @property
    def worker(self) -> str:
        """The address of the worker."""

    @property
    def is_exact(self) -> bool:
        """Whether the worker computes the bits of this trainer."""

    def expel(self, why: str) -> None:
        """Takes the worker out of the session for good."""

    def backward(
        self,
        gradients: Mapping[int, Tensor | StoredGradient],
        state: ambient_state.State,
        summed: Collection[int],
        due: Sequence[tuple[int, Layout]],
        may_stay: Mapping[int, Tensor],
        unsent: Collection[int] = (),
        upcoming: Sequence[int] | None = None,
        outputs: Sequence[Layout] = (),
        *,
        checks_bytes: bool,
    ) -> RemoteAnswer:
        """Runs the segment's backward on the worker.

        Args:
            gradients: The gradients of the program's outputs, by the output's position. They are not modified.
            state: Ambient settings under which backward runs.
            summed: Sources whose contributions are returned as their sum in order. The first has the sum, the others
                None.
            due: The source and the layout of the gradient of each contribution, in order.
            may_stay: Parameters whose gradients may stay on the worker, by source.
            unsent: Sources in `summed` whose gradients are not returned if they are in the answer's `stored`.
            upcoming: Numbers of the segments that the trainer will request next from this worker, in order. None stands
                for the one that was saved before this segment.
            outputs: The layouts of the program's outputs, if the trainer has not run forward: the answer then has their
                values, and the digests of contributions.
            checks_bytes: Whether both sides compute digests of the returned gradients.
        """

    def drifted(self, drift: float) -> None:
        """Notes the drift: the largest relative distance between the worker's tensors and those of forward."""

    def recompute(self, wanted: Mapping[int, Layout]) -> "SavedTensorStream":
        """Returns the saved tensors at these positions, in this order and with these layouts."""


class SavedTensorStream(Protocol):
    """Saved tensors that arrive from a worker. Its methods raise the errors of `RemoteSegment`."""

    compared: Recomputed

    def take(self, position: int) -> Tensor:
        """Returns a requested tensor, once."""

    def close(self) -> None:
        """Cancels the stream. Call it when no more tensors will be taken."""
