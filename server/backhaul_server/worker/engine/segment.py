"""The state that a worker keeps for one segment, and for the session that the segment belongs to."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from torch import Tensor

from backhaul_proto.v1 import tensor_pb2
from backhaul_runtime.process.logs import about
from backhaul_runtime.replay.schedule import Footprint
from backhaul_runtime.replay.schedule import Key as ScheduleKey
from backhaul_runtime.tensors.layout import Layout
from backhaul_runtime.wire.tensor_batches import SharedWriter
from backhaul_server.worker.accounts import Account
from backhaul_server.worker.engine.bounds import Bounds
from backhaul_server.worker.engine.executions import BackwardInputs, ExecutionResult, LiveReplay, SegmentInputs
from backhaul_server.worker.engine.fair_queue import Job
from backhaul_server.worker.engine.gradient_sums import GradientsToKeep
from backhaul_server.worker.engine.segment_machine import Key, SegmentMachine

MOST_UNPUSHED = 64
MOST_UNPREDICTABLE = 32
_NOTHING = Footprint(0, 0, 0)
T = TypeVar("T")

Operation = Callable[[SegmentInputs, LiveReplay | None], ExecutionResult]
"""The work of a request: takes the segment's inputs and its replay, if one is ready. Runs in the executor's thread."""


class SharedMemory(Protocol):
    """Memory that a session shares with its trainer on the same machine. Event loop only."""

    def use(self, location: tensor_pb2.Location, layout: Layout) -> tuple[Tensor, Callable[[], None]]:
        """Maps a tensor where it lies. Returns it, never to be written to, and a function that frees its memory."""
        ...

    def answering(self, answer: int) -> SharedWriter:
        """Returns a function that writes the tensors of this answer to memory that the trainer maps."""
        ...

    def close(self) -> None:
        """Stops sharing. Tensors that are in use keep their memory."""
        ...


@dataclass(slots=True)
class SegmentRequest:
    """A request of the trainer for a segment.

    Attributes:
        perform: The work; None once it has run, so that the tensors it holds are freed.
        backward_inputs: The inputs of a backward; None for a recompute.
        keep: The gradients that a backward may keep on the worker; None to send them all.
        unsent: Sources whose gradients need not be sent if they are among the chained ones.
        expected_s: Seconds that the trainer expects the execution to take.
        arrived_at_s: When the request arrived, in seconds since 1970.
        answer: Resolves to the result when the execution has ended; repeated requests share it.
    """

    perform: Operation | None
    backward_inputs: BackwardInputs | None
    keep: GradientsToKeep | None
    unsent: Sequence[int]
    expected_s: float
    arrived_at_s: float
    answer: "asyncio.Future[ExecutionResult]"


def result_of(answer: "asyncio.Future[T]") -> T:
    """Returns the result of a future that is done, or raises a copy of its error.

    A raised error refers to the frames that it passes. These refer to the future, which refers to its error: the cycle
    would keep the tensors of the frames alive.
    """
    error = answer.exception()
    if error is not None:
        raise copy(error)
    return answer.result()


@dataclass(frozen=True, slots=True)
class SpeculativeBackward:
    """A backward that the trainer will probably request.

    Attributes:
        inputs: The inputs that the request will probably name.
        gradients: The tensors that `inputs` names, by the program's output.
        result: The result of the backward, None until it has run.
        was_pushed: Whether the result was sent to the trainer before the request.
    """

    inputs: BackwardInputs
    gradients: Mapping[int, Tensor]
    result: ExecutionResult | None = None
    was_pushed: bool = False


@dataclass(eq=False)
class Segment:
    """The state of one segment. Event loop only, except `ready`, which a running job takes.

    Attributes:
        session: The session of the trainer that saved the segment.
        id: The trainer's number for the segment.
        inputs: The program and its input tensors, None once the segment was released.
        name: The checkpointed call's name, for logs.
        predecessors: For each source that is an output of an earlier segment, that segment's number and the output. The
            number is 0 if this worker does not have the segment.
        addresses: The address of the program, then those of its sources.
        is_confirmed: False while the trainer has only predicted the call that `inputs` describes.
        machine: Decides which work is due.
        speculation: The backward that will probably be requested; None while its gradients are unknown.
        ready: The replay that waits for a request or for a speculative backward; None if there is none.
        footprint: Bytes that an execution takes; an upper bound until a segment of the same kind was measured.
        bounds: Deadline, memory limit and cancellation of the segment's runs.
        queued_at_s: When the segment was scheduled for a replay ahead, in seconds since 1970.
        job: The executor's job for the segment, None while there is none.
        requests: Requests that have no answer yet or whose results are stored.
    """

    session: "SessionState"
    id: int
    inputs: SegmentInputs | None
    name: str
    predecessors: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    addresses: tuple[bytes, ...] = ()
    is_confirmed: bool = True
    machine: SegmentMachine = field(default_factory=SegmentMachine)
    speculation: SpeculativeBackward | None = None
    ready: LiveReplay | None = None
    footprint: Footprint = _NOTHING
    bounds: Bounds = field(default_factory=Bounds)
    queued_at_s: float = 0.0
    job: Job | None = None
    requests: dict[Key, SegmentRequest] = field(default_factory=dict)

    @property
    def key(self) -> ScheduleKey:
        """Names the segment among all segments of the worker; a segment that replaces it has another key."""
        return self.session.id, id(self)

    @property
    def execution_bytes(self) -> int:
        """The most bytes that a requested execution takes, with the replays that missing sources are computed by."""
        most_bytes, waiting, seen = 0, [self], {self.id}
        while waiting:
            segment = waiting.pop()
            most_bytes = max(most_bytes, segment.footprint.execution_bytes)
            if segment.inputs is not None and not segment.inputs.is_complete:
                earlier = [before for before in segment.saved_predecessors() if before.id not in seen]
                seen.update(before.id for before in earlier)
                waiting += earlier
        return most_bytes

    def matches_recorded_rng(self, ready: LiveReplay) -> bool:
        """Whether a replay drew from the generator states of the call. True until the call is confirmed."""
        inputs = self.inputs
        if not self.is_confirmed or inputs is None:
            return True
        return all(
            given in (b"", drawn) for given, drawn in zip(inputs.generator_states, ready.replay.drawn_from, strict=True)
        )

    @property
    def chained(self) -> set[int]:
        """The sources whose gradients a backward of an earlier segment on this worker starts with."""
        return {source for source, (number, _) in self.predecessors.items() if number}

    def saved_predecessors(self) -> "list[Segment]":
        """Returns the segments whose outputs are sources of this one, without those that were released."""
        numbers = {number for number, _ in self.predecessors.values()}
        segments = [self.session.segments.get(number) for number in sorted(numbers)]
        return [segment for segment in segments if segment is not None]

    def pushed_next(self) -> list[int]:
        """Returns the numbers of the predecessors whose results are pushed next."""
        is_open = self.session.push_queue is not None
        return [segment.id for segment in self.saved_predecessors() if is_open and segment.is_speculating]

    @property
    def can_speculate(self) -> bool:
        """Whether the trainer has requested nothing yet, and no speculative backward is known."""
        return self.is_confirmed and self.speculation is None and not self.machine.was_asked

    @property
    def is_speculating(self) -> bool:
        """Whether a speculative backward has run, runs now, or has a replay to run on."""
        return bool(self.speculation and (self.speculation.result or self.ready or self.job))

    @property
    def about(self) -> dict[str, Any]:
        """The `extra` of log calls about the segment."""
        return about(self.session.run, self.name)


@dataclass(eq=False)
class SessionState:
    """A worker session: what the worker holds for one trainer. Event loop only.

    Attributes:
        id: A random name that others cannot guess.
        account: The account of the credential that opened it.
        trainer: The trainer's name, for logs and the dashboard.
        expires_at: When the lease runs out, by the monotonic clock.
        segments: Segments that are not released, by the trainer's number.
        gradients: Addresses of the cached gradients that were received or sent last, oldest first.
        answers: Number of answers that are being sent.
        requests: Number of requests that have no answer yet.
        streams: Number of open long-lived streams.
        own_bytes: Bytes charged to the session itself in the store, without its segments.
        most_segments: The largest number of segments that it had at once.
        last_release: The largest number of a release request that has arrived.
        is_closed: Whether the session has ended, so that nothing more may be kept for it.
        named_sources: Number of sources that all of its segments name together.
        drift: The largest difference between its results and the worker's that the trainer has measured.
        run: The trainer's run, which may have sessions on other workers too.
        client_version: The trainer's version of backhaul.
        last_error: Message of the last request that was refused or that failed, empty if none.
        token: The digest of the token that opened it, empty if the worker requires none.
        unpredictable: Programs whose predicted replays drew from the wrong generator states; the last
            `MOST_UNPREDICTABLE` addresses.
        memory: Memory shared with the trainer, None unless it runs on this machine.
        push_queue: Segments whose speculative backward has run, to be pushed on the trainer's stream. None while
            nothing is pushed; a None in it ends the pushing.
    """

    id: str
    account: Account
    trainer: str
    expires_at: float
    segments: dict[int, Segment] = field(default_factory=dict)
    gradients: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    answers: int = 0
    requests: int = 0
    streams: int = 0
    own_bytes: int = 0
    most_segments: int = 0
    last_release: int = 0
    is_closed: bool = False
    named_sources: int = 0
    drift: float = 0.0
    run: str = ""
    client_version: str = ""
    last_error: str = ""
    token: bytes = b""
    unpredictable: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    memory: SharedMemory | None = None
    push_queue: "asyncio.Queue[Segment | None] | None" = None

    def note_misprediction(self, program: bytes) -> None:
        """Notes that a predicted replay of this program drew from other generator states than the call did."""
        self.unpredictable[program] = None
        while len(self.unpredictable) > MOST_UNPREDICTABLE:
            self.unpredictable.popitem(last=False)

    def push(self, segment: Segment) -> None:
        """Queues a finished speculative backward for the trainer's push stream.

        Dropped if no stream is open or `MOST_UNPUSHED` results wait: the trainer then calls Backward, so only latency
        is lost.
        """
        if self.push_queue is not None and self.push_queue.qsize() < MOST_UNPUSHED:
            self.push_queue.put_nowait(segment)

    def open_push_queue(self) -> "asyncio.Queue[Segment | None]":
        """Opens a push queue. It replaces the present one, whose stream ends."""
        self.close_push_queue()
        self.push_queue = asyncio.Queue()
        return self.push_queue

    def close_push_queue(self) -> None:
        """Closes the push queue, which ends its stream."""
        if self.push_queue is not None:
            self.push_queue.put_nowait(None)
            self.push_queue = None
