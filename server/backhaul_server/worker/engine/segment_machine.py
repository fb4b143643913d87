"""The life of a segment on a worker as a pure state machine: methods take events and return instructions.

NOTE [Segment phases]
1. `TRANSITIONS` lists every event, the phases in which it is legal, and the phase that follows:

       SAVED ──replay_ahead──> REPLAYING ──replayed──> READY ──speculate──> REPLAYING
         │                         │                     │
         └──────── run ────────────│──────── run ────────┴──> RUNNING ──ran──> SAVED, with a result
                                   └── a request waits until the replay has ended

2. `released` is legal in every phase. The executor cannot stop an op, so a segment that is released during a replay or
   an execution waits in RELEASED_IN_REPLAY or RELEASED_IN_EXECUTION until the executor reports the outcome, which is
   then dropped.
3. An event that the table does not list for the present phase is a bug of the engine. It raises
   `InvalidTransitionError`, which carries the segment's last events, and changes nothing.
4. A request is named by its operation and its backward number, which together are its idempotency key. A repeated
   request joins the attempt that is in progress, or is answered from the stored result.

The machine never waits, computes or holds a tensor. The event loop's thread alone uses it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, auto
from typing import NamedTuple

MAX_EVENTS = 32
"""The number of events that a segment's history keeps."""


class Phase(IntEnum):  # its hash is computed in C, unlike that of an Enum
    """The work that the executor does for a segment."""

    SAVED = auto()  # nothing: only the inputs are stored
    REPLAYING = auto()  # a replay or a speculative backward is in progress
    READY = auto()  # nothing: a replay, or the result of a speculative backward, waits for a request
    RUNNING = auto()  # the execution of a request is in progress or queued
    RELEASED_IN_REPLAY = auto()
    RELEASED_IN_EXECUTION = auto()
    RELEASED = auto()


TRANSITIONS: Mapping[str, Mapping[Phase, Phase]] = {
    "replay_ahead": {Phase.SAVED: Phase.REPLAYING},
    "speculate": {Phase.READY: Phase.REPLAYING},
    "replayed": {Phase.REPLAYING: Phase.READY, Phase.RELEASED_IN_REPLAY: Phase.RELEASED},
    "replay_failed": {Phase.REPLAYING: Phase.SAVED, Phase.RELEASED_IN_REPLAY: Phase.RELEASED},
    "requested": {phase: phase for phase in Phase},
    "run": {Phase.SAVED: Phase.RUNNING, Phase.READY: Phase.RUNNING},
    "ran": {Phase.RUNNING: Phase.SAVED, Phase.RELEASED_IN_EXECUTION: Phase.RELEASED},
    "run_failed": {Phase.RUNNING: Phase.SAVED, Phase.RELEASED_IN_EXECUTION: Phase.RELEASED},
    # An execution that waits in the queue has not used its replay yet, so the store may still evict that.
    "dropped": {Phase.READY: Phase.SAVED, Phase.RUNNING: Phase.RUNNING},
    "forgot": {phase: phase for phase in (Phase.SAVED, Phase.REPLAYING, Phase.READY, Phase.RUNNING)},
    "released": {phase: phase for phase in Phase}
    | {
        Phase.SAVED: Phase.RELEASED,
        Phase.READY: Phase.RELEASED,
        Phase.REPLAYING: Phase.RELEASED_IN_REPLAY,
        Phase.RUNNING: Phase.RELEASED_IN_EXECUTION,
    },
}
"""For each event, the phases in which it is legal, each with the phase that follows.

The machine itself adds "run" after a request or the end of a replay or execution.
"""


class InvalidTransitionError(AssertionError):
    """The engine reported an event that is illegal in the segment's phase. This is a bug of the worker.

    Attributes:
        event: The illegal event with the phase and its arguments, such as "SAVED: ran(backward 2)".
        story: The segment's last `MAX_EVENTS` legal events in the same form, oldest first.
    """

    def __init__(self, event: str, story: tuple[str, ...]) -> None:
        super().__init__(event, story)
        self.event, self.story = event, story

    def __str__(self) -> str:
        events = "".join(f"\n  {event}" for event in self.story) or "\n  (none)"
        return f"illegal event of a segment: {self.event}. Its last events, oldest first:{events}"


class Key(NamedTuple):
    """Names a request among those of its segment.

    Attributes:
        operation: Either "backward" or "recompute".
        backward: The trainer's number for the backward pass that the request belongs to.
    """

    operation: str
    backward: int


@dataclass(frozen=True, slots=True)
class ReplayAhead:
    """Instruction: replay the segment. No request waits for it yet."""


@dataclass(frozen=True, slots=True)
class SpeculateBackward:
    """Instruction: run the backward that the trainer will probably request, on the replay that is ready."""


@dataclass(frozen=True, slots=True)
class Execute:
    """Instruction: run the operation of this request, on the replay that is ready if there is one."""

    key: Key


@dataclass(frozen=True, slots=True)
class Answer:
    """Instruction: give the result of this request to everyone who waits for it."""

    key: Key


@dataclass(frozen=True, slots=True)
class AnswerError:
    """Instruction: give the error of this request to everyone who waits for it, and forget the request."""

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
    """Instruction: free the program and tensors that the segment was saved with."""


Instruction = ReplayAhead | SpeculateBackward | Execute | Answer | AnswerError | DropReplay | ForgetResult | Free


@dataclass(slots=True)
class SegmentMachine:
    """The state of one segment. Each public method is an event; it returns what the engine must do about it.

    Every event raises InvalidTransitionError where it is illegal.

    Attributes:
        phase: The work that the executor does for the segment.
        running: The request that the executor runs or has queued, None if there is none.
        waiting: Requests that run once the present replay or execution has ended, in the order of arrival.
        results: Requests whose results are stored.
    """

    phase: Phase = Phase.SAVED
    running: Key | None = None
    waiting: list[Key] = field(default_factory=list)
    results: set[Key] = field(default_factory=set)
    _history: str = ""

    @property
    def story(self) -> tuple[str, ...]:
        """The last `MAX_EVENTS` events with the phase that each one met, oldest first."""
        return tuple(self._history.splitlines())

    @property
    def is_released(self) -> bool:
        """Whether the segment was released, even if the executor still works on it."""
        return self.phase in {Phase.RELEASED, Phase.RELEASED_IN_REPLAY, Phase.RELEASED_IN_EXECUTION}

    @property
    def was_asked(self) -> bool:
        """Whether a request is in progress, or has a result."""
        return bool(self.running or self.waiting or self.results)

    def replay_ahead(self) -> list[Instruction]:
        """The executor is idle, and the trainer will request the segment."""
        self._enter("replay_ahead")
        return [ReplayAhead()]

    def speculate(self) -> list[Instruction]:
        """The executor is idle, and the gradients that the segment's backward will probably start from are known."""
        self._enter("speculate")
        return [SpeculateBackward()]

    def requested(self, key: Key) -> list[Instruction]:
        """A request arrived, for the first time or again."""
        self._enter("requested", key)
        if self.is_released:
            return [AnswerError(key)]
        if key in self.results:
            return [Answer(key)]
        if key == self.running or key in self.waiting:
            return []
        # The trainer requests a later backward only after it has received the results of the earlier ones.
        stale = [old for old in self.results if old.backward < key.backward]
        self.results.difference_update(stale)
        forget: list[Instruction] = [ForgetResult(old) for old in stale]
        if self.phase in {Phase.REPLAYING, Phase.RUNNING}:
            self.waiting.append(key)
            return forget
        return [*forget, *self._run(key)]

    def replayed(self, *, succeeded: bool) -> list[Instruction]:
        """The replay or the speculative backward ended. No error is kept: the request will raise its own."""
        self._enter("replayed" if succeeded else "replay_failed")
        if self.is_released:
            return [DropReplay()] if succeeded else []
        return self._run_next()

    def ran(self, key: Key, *, succeeded: bool) -> list[Instruction]:
        """The execution of this request ended. Illegal for any request but the running one."""
        self._enter("ran" if succeeded else "run_failed", key, is_legal=key == self.running)
        self.running = None
        if self.is_released:
            return [ForgetResult(key), AnswerError(key)] if succeeded else [AnswerError(key)]
        if not succeeded:
            return [AnswerError(key), *self._run_next()]
        self.results.add(key)
        return [Answer(key), *self._run_next()]

    def dropped(self) -> None:
        """The engine freed the replay that was ready, because the store needed its memory or because it was wrong."""
        self._enter("dropped")

    def forgot(self, key: Key) -> None:
        """The store needed the memory of this result. Illegal for a request without a result."""
        self._enter("forgot", key, is_legal=key in self.results)
        self.results.remove(key)

    def released(self) -> list[Instruction]:
        """The trainer will not request the segment again. A repeated release changes nothing."""
        was_released, was_ready = self.is_released, self.phase is Phase.READY
        self._enter("released")
        if was_released:
            return []
        out: list[Instruction] = [AnswerError(key) for key in self.waiting]
        out += [ForgetResult(key) for key in sorted(self.results, key=lambda key: key.backward)]
        if was_ready:
            out.append(DropReplay())
        self.waiting.clear()
        self.results.clear()
        return [*out, Free()]

    def _run(self, key: Key) -> list[Instruction]:
        self._enter("run", key)
        self.running = key
        return [Execute(key)]

    def _run_next(self) -> list[Instruction]:
        return self._run(self.waiting.pop(0)) if self.waiting else []

    def _enter(self, event: str, key: Key | None = None, *, is_legal: bool = True) -> None:
        """Moves to the phase that `TRANSITIONS` gives, and records the event. Raises InvalidTransitionError."""
        entry = f"{self.phase.name}: {event}({f'{key.operation} {key.backward}' if key is not None else ''})"
        following = TRANSITIONS[event].get(self.phase)
        if following is None or not is_legal:
            raise InvalidTransitionError(entry, self.story)
        # One string takes a third of a list of events. A trainer that repeats requests can fill the history of every
        # segment, and that memory must fit what the store charges for a segment.
        self._history = "\n".join((*self.story[1 - MAX_EVENTS :], entry))
        self.phase = following
