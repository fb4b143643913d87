"""A segment on its way to a worker, and the tensors that it names."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from backhaul._worker_client.connection.worker_session import WorkerSession
from backhaul._worker_client.upload.backward_chains import Predecessor
from backhaul_runtime.errors import WorkerLostError
from backhaul_runtime.process.death_queue import DeathNotice
from backhaul_runtime.process.latch import Promise
from backhaul_runtime.tensors.deferred_digest import Digest
from backhaul_runtime.tensors.layout import Layout
from backhaul_runtime.tensors.staging import DeviceMoment


class SourceTensor(NamedTuple):
    """A tensor that a segment names.

    Attributes:
        address: The address of its contents in forward; empty if its contents at the time of sending count.
        layout: The layout of the tensor in forward.
        value: The tensor to send. The worker rejects it if it has changed since forward. None if the worker stores the
            tensor and its memory here may be freed at any time.
        is_copy: Whether `value` is a copy that waits to be sent.
        is_transient: Whether no later segment will name it.
    """

    address: Digest
    layout: Layout
    value: Tensor | None
    is_copy: bool
    is_transient: bool

    def to_read(self) -> Tensor:
        """Returns the value. Raises WorkerLostError if it is None."""
        if self.value is None:
            raise WorkerLostError(
                "the worker evicted a parameter that FSDP has freed on the trainer as well: give the worker more "
                "--memory",
                status="BUSY",
            )
        return self.value


@dataclass(eq=False)
class SegmentUpload:
    """A segment to be saved on a worker.

    Attributes:
        worker_session: The worker session to send it to.
        segment: Number of the segment in its session.
        program: The encoded program of the segment.
        program_address: The content address of the program.
        sources: The sources in the order of the program; empty once the worker has them.
        generator_states: One state for each node that draws.
        name: The checkpointed call's name, for messages.
        queued_bytes: Bytes of copies of arguments that it holds until it has been sent.
        saved: Completes when the worker has saved the segment, or with the error that prevented that.
        count: Called with the number of sent bytes.
        sent: Called with the times of sending its tensors, after that has ended.
        spared: Called with the number of bytes that differences have spared.
        wants_projections: Whether the worker computes other bits, so that random projections are compared.
        compares_outputs: Whether the worker's digests are to be those of the program's outputs, not of saved tensors.
        predecessors: Earlier segments on the same worker whose outputs are sources of this one.
        boundaries: Sources that are outputs of other earlier segments.
        is_predicted: Whether its call has not ended yet.
        superseded: Returns the addresses of cached tensors that will not be named again.
        made: For each accelerator, the moment at which the sources were complete.
        owner: The death notice of the object that will request the segment. If it has died, the upload is skipped.
    """

    worker_session: WorkerSession
    segment: int
    program: bytes
    program_address: bytes
    sources: Sequence[SourceTensor]
    generator_states: Sequence[bytes]
    name: str
    queued_bytes: int
    count: Callable[[int], None]
    sent: Callable[[float], None]
    wants_projections: bool = False
    compares_outputs: bool = False
    predecessors: Sequence[Predecessor] = ()
    boundaries: Sequence[int] = ()
    spared: Callable[[int], None] = lambda _: None
    is_predicted: bool = False
    superseded: Callable[[], Sequence[bytes]] = tuple
    made: Sequence[DeviceMoment] = ()
    saved: Promise[None] = field(default_factory=Promise)
    owner: DeathNotice | None = None
