"""The life of a segment on a worker as a pure state machine: an event goes in, instructions come out.

    saved ──ahead──> replaying ──done──> ready
      │                  │                 │
      └────request───────┴────request──────┴──> running ──done──> saved, with a result
    ready ──guess──> replaying: its backward runs, on gradients that the request will probably name
    any of them ──release──> released

Requests are named by operation and backward (their idempotency key). One that is asked for again joins the attempt that
runs, or is answered from its result. Nothing here waits, computes or holds a tensor.
"""

from dataclasses import dataclass, field
from enum import Enum, auto


class Phase(Enum):
    """What the executor does with the segment now."""

    SAVED = auto()
    REPLAYING = auto()
    READY = auto()
    RUNNING = auto()
    RELEASED = auto()


@dataclass(frozen=True, slots=True)
class Key:
    """Names a request among those of its segment.

    Attributes:
        operation: "backward" or "recompute".
        backward: Which pass of backward it belongs to.
    """

    operation: str
    backward: int


@dataclass(frozen=True, slots=True)
class ReplayAhead:
    """Instruction: replay the segment, nobody waits for it yet."""


@dataclass(frozen=True, slots=True)
class GuessAhead:
    """Instruction: run the backward that will probably be asked for, on the replay that is ready."""


@dataclass(frozen=True, slots=True)
class Run:
    """Instruction: do what the request asks, on the replay that is ready if there is one."""

    key: Key


@dataclass(frozen=True, slots=True)
class Answer:
    """Instruction: give the result of this request to all who wait for it."""

    key: Key


@dataclass(frozen=True, slots=True)
class AnswerError:
    """Instruction: give the error of this request to all who wait for it, and forget it."""

    key: Key


@dataclass(frozen=True, slots=True)
class DropReplay:
    """Instruction: free the replay that is ready."""


@dataclass(frozen=True, slots=True)
class ForgetResult:
    """Instruction: free the result of this request."""

    key: Key


@dataclass(frozen=True, slots=True)
class Free:
    """Instruction: free what the segment was saved with. The last one a segment gives."""


Instruction = ReplayAhead | GuessAhead | Run | Answer | AnswerError | DropReplay | ForgetResult | Free


@dataclass(slots=True)
class SegmentMachine:
    """State of one segment. Each method is an event and returns what is to be done about it."""

    phase: Phase = Phase.SAVED
    running: Key | None = None
    waiting: list[Key] = field(default_factory=list)
    results: set[Key] = field(default_factory=set)

    @property
    def was_asked(self) -> bool:
        """Whether a request is being worked on, or has been."""
        return bool(self.running or self.waiting or self.results)

    def ahead(self) -> list[Instruction]:
        """The executor is free to replay it, and the trainer will ask for it."""
        if self.phase is not Phase.SAVED:
            return []
        self.phase = Phase.REPLAYING
        return [ReplayAhead()]

    def guess(self) -> list[Instruction]:
        """The executor is free, and it is known what the segment's backward will probably start from."""
        if self.phase is not Phase.READY:
            return []
        self.phase = Phase.REPLAYING
        return [GuessAhead()]

    def requested(self, key: Key) -> list[Instruction]:
        """A request came, for the first time or again."""
        if self.phase is Phase.RELEASED:
            return [AnswerError(key)]
        if key in self.results:
            return [Answer(key)]
        if key == self.running or key in self.waiting:
            return []
        # A later backward means that the trainer has what earlier ones gave.
        stale = [old for old in self.results if old.backward < key.backward]
        self.results.difference_update(stale)
        forget: list[Instruction] = [ForgetResult(old) for old in stale]
        if self.phase in {Phase.REPLAYING, Phase.RUNNING}:
            self.waiting.append(key)
            return forget
        return [*forget, *self._run(key)]

    def replayed(self, *, succeeded: bool) -> list[Instruction]:
        """The replay ahead, or the guess, ended. An error is not kept: the request that needs it will meet its own."""
        if self.phase is Phase.RELEASED:
            return [DropReplay()] if succeeded else []
        self.phase = Phase.READY if succeeded else Phase.SAVED
        return self._next()

    def ran(self, key: Key, *, succeeded: bool) -> list[Instruction]:
        """A run ended."""
        self.running = None
        if self.phase is Phase.RELEASED:
            return [ForgetResult(key), AnswerError(key)] if succeeded else [AnswerError(key)]
        self.phase = Phase.SAVED
        if not succeeded:
            return [AnswerError(key), *self._next()]
        self.results.add(key)
        return [Answer(key), *self._next()]

    def dropped(self) -> None:
        """The store needed the room of the replay that was ready."""
        if self.phase is Phase.READY:
            self.phase = Phase.SAVED

    def forgot(self, key: Key) -> None:
        """The store needed the room of a result."""
        self.results.discard(key)

    def released(self) -> list[Instruction]:
        """Nobody will ask for the segment again."""
        if self.phase is Phase.RELEASED:
            return []
        out: list[Instruction] = [AnswerError(key) for key in self.waiting]
        out += [ForgetResult(key) for key in sorted(self.results, key=lambda key: key.backward)]
        if self.phase is Phase.READY:
            out.append(DropReplay())
        self.phase = Phase.RELEASED
        self.waiting.clear()
        self.results.clear()
        return [*out, Free()]

    def _run(self, key: Key) -> list[Instruction]:
        self.phase = Phase.RUNNING
        self.running = key
        return [Run(key)]

    def _next(self) -> list[Instruction]:
        return self._run(self.waiting.pop(0)) if self.waiting else []
