"""What a worker has of a segment, and of the trainer whose it is."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from backhaul_proto.v1 import tensor_pb2
from backhaul_runtime.process.logs import about
from backhaul_runtime.replay.schedule import Footprint
from backhaul_runtime.replay.schedule import Key as ScheduleKey
from backhaul_runtime.tensors.layout import Layout
from backhaul_runtime.wire.tensor_stream import SharedWriter
from backhaul_server.worker.engine.bounds import Bounds
from backhaul_server.worker.engine.fair_queue import Job
from backhaul_server.worker.engine.gradient_sums import GradientsToKeep
from backhaul_server.worker.engine.runs import BackwardInputs, LiveReplay, RunResult, SegmentInputs
from backhaul_server.worker.engine.segment_machine import (
    Key,
    SegmentMachine,
)

MOST_UNTOLD = 64
MOST_UNPREDICTABLE = 32
_NOTHING = Footprint(0, 0, 0)

Operation = Callable[[SegmentInputs, LiveReplay | None], RunResult]
"""What a request wants done with a segment. Called in the executor's thread."""


class SharedMemory(Protocol):
    """Memory that a session shares with its trainer, who is on the same machine. Event loop only."""

    def use(self, location: tensor_pb2.Location, layout: Layout) -> tuple[Tensor, Callable[[], None]]:
        """A tensor in place, which must not be written to, and a function that frees its memory at once."""
        ...

    def answering(self, answer: int) -> SharedWriter:
        """A function that writes tensors of an answer where the trainer will find them."""
        ...

    def close(self) -> None:
        """Ends the sharing. Tensors in use keep their memory."""
        ...


@dataclass(slots=True)
class SegmentRequest:
    """A request for a segment.

    Attributes:
        perform: The work; None once it is done, with the tensors it held.
        start: Of a backward.
        keep: What a backward may keep here.
        expected_s: What the trainer thinks it takes.
        came_at_s: When it came, in seconds since 1970.
        answer: Done when the work is; holds the result for those who ask again.
    """

    perform: Operation | None
    start: BackwardInputs | None
    keep: GradientsToKeep | None
    expected_s: float
    came_at_s: float
    answer: "asyncio.Future[RunResult]"


@dataclass(frozen=True, slots=True)
class SpeculativeBackward:
    """A backward nobody asked for yet.

    Attributes:
        start: What it starts from.
        gradients: The tensors that `start` names.
        finished: Its result, None until it has run.
        was_pushed: The trainer has been sent that.
    """

    start: BackwardInputs
    gradients: Mapping[int, Tensor]
    finished: RunResult | None = None
    was_pushed: bool = False


@dataclass(eq=False)
class Segment:
    """What the worker has of a segment.

    Attributes:
        session: Whose it is.
        id: The trainer's number for it.
        work: Program and tensors, None once it was released.
        name: For people.
        predecessors: By source, the segment and output it is.
        made_of: Addresses of its program and of its sources.
        is_confirmed: Its call has ended, and was what `work` says.
        guess: What its backward will probably start from, and its result once that has run.
        footprint: What its run takes; once one of its kind was replayed, by measurement.
        bounds: Of its runs.
        queued_at_s: When it could be replayed ahead, in seconds since 1970.
    """

    session: "SessionState"
    id: int
    work: SegmentInputs | None
    name: str
    predecessors: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    made_of: tuple[bytes, ...] = ()
    is_confirmed: bool = True
    machine: SegmentMachine = field(default_factory=SegmentMachine)
    guess: SpeculativeBackward | None = None
    ready: LiveReplay | None = None
    footprint: Footprint = _NOTHING
    bounds: Bounds = field(default_factory=Bounds)
    queued_at_s: float = 0.0
    job: Job | None = None
    requests: dict[Key, SegmentRequest] = field(default_factory=dict)

    @property
    def key(self) -> ScheduleKey:
        """Names it among all segments of the worker, also beside one that it replaces."""
        return self.session.id, id(self)

    def fits(self, ready: LiveReplay) -> bool:
        """Whether a replay is that of the call, as far as the call has ended."""
        return not self.is_confirmed or self.work is None or ready.replay.drawn_from == list(self.work.generator_states)

    def before(self) -> "list[Segment]":
        """The segments whose outputs are sources of this one, as far as they are there."""
        numbers = {number for number, _ in self.predecessors.values()}
        found = [self.session.segments.get(number) for number in sorted(numbers)]
        return [each for each in found if each is not None]

    def goes_on(self) -> list[int]:
        """The segments before it whose trainer is to be told of a guess soon."""
        return [each.id for each in self.before() if each.is_guessed_soon] if self.session.telling is not None else []

    @property
    def takes_guess(self) -> bool:
        """Whether nobody asked or guessed yet."""
        return self.is_confirmed and self.guess is None and not self.machine.was_asked

    @property
    def is_guessed_soon(self) -> bool:
        """Whether there is a guess, and a replay that it has run on, runs on or can run on."""
        guess = self.guess
        return guess is not None and (guess.finished is not None or self.ready is not None or self.job is not None)

    @property
    def about(self) -> dict[str, Any]:
        """What a log call about it passes as `extra`."""
        return about(self.session.run, self.name)


@dataclass(eq=False)
class SessionState:
    """A trainer's stay.

    Attributes:
        id: Not to be guessed.
        trainer: For people.
        expires_at: When its lease runs out, by the monotonic clock.
        segments: By the trainer's number.
        gradients: Addresses of the last gradients that came or went, which are cached.
        answers: How many are being sent.
        requests: How many have no answer yet.
        streams: How many are open that stay so.
        own_bytes: What it is charged with in the store, beside what its segments are.
        most_segments: The most that it had at once.
        is_closed: Nothing may be kept for it any more.
        named: Sources that its segments name, in all.
        drift: The largest its trainer measured between its numbers and ours.
        run: The trainer's session, which may have others on other workers.
        client_version: Of the trainer.
        last_error: Of the last request that was refused or failed.
        unpredictable: Programs that draw from other generator states than the replay of a prediction does, the last
            `MOST_UNPREDICTABLE` of them.
        memory: What is shared with its trainer, if that is on this machine.
        telling: Segments whose guess has run, for a trainer that wants to be told; None ends that.
    """

    id: str
    trainer: str
    expires_at: float
    segments: dict[int, Segment] = field(default_factory=dict)
    gradients: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    answers: int = 0
    requests: int = 0
    streams: int = 0
    own_bytes: int = 0
    most_segments: int = 0
    is_closed: bool = False
    named: int = 0
    drift: float = 0.0
    run: str = ""
    client_version: str = ""
    last_error: str = ""
    unpredictable: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    memory: SharedMemory | None = None
    telling: "asyncio.Queue[Segment | None] | None" = None

    def mispredicted(self, program: bytes) -> None:
        """A replay of a prediction drew from other generator states than the call."""
        self.unpredictable[program] = None
        while len(self.unpredictable) > MOST_UNPREDICTABLE:
            self.unpredictable.popitem(last=False)

    def tell(self, segment: Segment) -> None:
        """Has a trainer that wants to be told, and listens, told of a guess that has run."""
        if self.telling is not None and self.telling.qsize() < MOST_UNTOLD:
            self.telling.put_nowait(segment)

    def start_telling(self) -> "asyncio.Queue[Segment | None]":
        """In place of a queue that was there."""
        self.stop_telling()
        self.telling = asyncio.Queue()
        return self.telling

    def stop_telling(self) -> None:
        """Whoever waits for the queue meets its end."""
        if self.telling is not None:
            self.telling.put_nowait(None)
            self.telling = None
