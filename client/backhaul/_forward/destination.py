"""The destination of the segments of a session, as forward sees it."""

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from torch import Tensor

from backhaul._backward.checkpointed_call import CheckpointedCall
from backhaul._backward.frame import RecordedSegment
from backhaul._backward.lineage import Copies
from backhaul._backward.remote_side import RemoteSegment
from backhaul._dispatch.prediction import PendingCall
from backhaul._observe.report import Journal
from backhaul._observe.telemetry import Telemetry
from backhaul_runtime.program.names import JoinedNames
from backhaul_runtime.program.program import Program
from backhaul_runtime.record.contents import FixedDigests
from backhaul_runtime.tensors.durations import Duration


class Destination(Protocol):
    """The destination of segments: a session's dispatcher. Thread-safe.

    Attributes:
        journal: Counts calls by name.
        telemetry: Reports calls; None if telemetry is off.
        copies: The copies of tensors that the trainer keeps.
    """

    journal: Journal
    telemetry: Telemetry | None
    copies: Copies

    @property
    def fixed(self) -> FixedDigests | None:
        """Digests of parameters, while the calling thread has a block open in which they must not change; else None."""

    def keeps_activations(self, name: str) -> bool:
        """Whether the trainer keeps the activations of the call of this name that begins now."""

    def records_choices(self, device_types: Iterable[str]) -> bool:
        """Whether a worker computes other bits than a device of these types, see NOTE [Recorded choices]."""

    def allows(self) -> JoinedNames:
        """Returns what workers run beside torch's own ops."""

    def begin(self, call: CheckpointedCall, fn: Callable[..., Any], arguments: list[Tensor]) -> PendingCall:
        """Sends the inputs of a call that begins now, if its program can be predicted.

        Args:
            call: The call, whose recording is still empty.
            fn: The function that will be called.
            arguments: The tensors among its arguments.
        """

    def save(self, segment: RecordedSegment, pending: PendingCall, forward: Duration) -> tuple[RemoteSegment, Program]:
        """Starts sending a segment. Raises Refusal if no worker takes it.

        Args:
            segment: The segment as it was recorded in forward.
            pending: What `begin` returned for the call.
            forward: What forward took, which determines the deadline of a recomputation.

        Returns:
            The remote side, and the program to keep: an earlier one if that is equal.
        """
