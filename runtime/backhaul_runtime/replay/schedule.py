"""Decides which speculative work a worker does next, and which replays it evicts. No tensors, threads or clocks.

Speculative work is a replay, or a predicted backward, that runs before the trainer requests it.

NOTE [Order of need]
1. First come the segments that the trainer has announced as its next requests, in that order. Then backward needs the
   others in the reverse of the order in which they were saved. Once it has reached a segment, it continues with those
   saved before that one.
2. The segments needed first keep their replays, as far as the room allows. Room is left for the segments that forward
   has yet to save, estimated by the previous forward, and for the largest temporary need of one execution. So no replay
   is made that would have to be evicted for them.
3. Of the segments that keep a replay, those without one are replayed in the order of need. While forward runs, those
   that are not announced are replayed in the order of saving.
4. Speculative work evicts replays that the same session needs later, then replays of sessions that hold more bytes than
   its own session would then hold.
5. A requested execution evicts the last needed replay of the session that holds the most bytes.
6. Sessions take turns.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice

Key = tuple[Hashable, int]
"""Names a segment: its session, and a number that is unique within the session."""

MOST_AHEAD = 1024
"""The most segments of a session that one call of `Schedule.next` considers. It bounds the time that a call takes."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """The bytes that a segment's replay and backward take on a worker, without the sources it was saved with.

    Attributes:
        replay_bytes: The most bytes held while the replay runs.
        ready_bytes: The bytes that a finished replay holds: outputs and saved tensors.
        backward_bytes: The most bytes held while the backward runs, those of the replay included.
    """

    replay_bytes: int
    ready_bytes: int
    backward_bytes: int

    @property
    def execution_bytes(self) -> int:
        """The most bytes held at any time from the start of the replay to the end of the backward."""
        return max(self.replay_bytes, self.backward_bytes)

    def beside(self, other_bytes: int) -> "Footprint":
        """Returns the footprint with `other_bytes` added throughout, for memory that is held all the time."""
        return Footprint(
            self.replay_bytes + other_bytes, self.ready_bytes + other_bytes, self.backward_bytes + other_bytes
        )


@dataclass(frozen=True, slots=True)
class ScheduledWork:
    """The speculative work to do next.

    Attributes:
        key: The segment to replay or, if its replay is ready, whose predicted backward is to run.
        evicts: The segments whose replays have to be evicted first.
    """

    key: Key
    evicts: tuple[Key, ...]


@dataclass(slots=True, eq=False)
class _Segment:
    order: int  # the number of the `saved` event, so later segments have larger ones
    footprint: Footprint
    source_bytes: int = 0
    is_expected: bool = False
    is_backward_predicted: bool = False
    is_done: bool = False  # it holds the results of a speculative backward rather than a replay
    held_bytes: int | None = None  # None while it holds nothing

    @property
    def live_bytes(self) -> int:
        return self.footprint.ready_bytes if self.held_bytes is None else self.held_bytes

    @property
    def beside_bytes(self) -> int:
        """The bytes that its next execution takes in addition to `live_bytes`, and that are freed afterwards."""
        return 0 if self.is_done else max(0, self.footprint.execution_bytes - self.live_bytes)

    @property
    def has_work(self) -> bool:
        return self.is_expected if self.held_bytes is None else self.is_backward_predicted

    @property
    def work_bytes(self) -> int:
        """The bytes that its speculative work takes in addition to those that it holds already."""
        return self.footprint.replay_bytes if self.held_bytes is None else self.beside_bytes


@dataclass(slots=True)
class _Session:
    segments: dict[int, _Segment] = field(default_factory=dict)
    with_replay: dict[int, _Segment] = field(default_factory=dict)  # the segments that hold bytes
    held_bytes: int = 0
    reached: int | None = None  # `order` of the segment that backward reached last; None while forward runs
    announced: dict[int, None] = field(default_factory=dict)  # numbers of the segments requested next, in order
    saved: list[_Segment] = field(default_factory=list)  # segments of the present forward
    saved_before: list[_Segment] = field(default_factory=list)  # segments of the previous forward

    def next_requests(self) -> Iterator[tuple[int, _Segment]]:
        """Yields the announced segments that still exist."""
        return ((number, self.segments[number]) for number in self.announced if number in self.segments)

    def others_in_order_of_need(self) -> Iterator[tuple[int, _Segment]]:
        """Yields the segments that are not announced."""
        reached = self.reached
        others = [item for item in reversed(self.segments.items()) if item[0] not in self.announced]
        if reached is not None:
            yield from (item for item in others if item[1].order <= reached)
        yield from (item for item in others if reached is None or item[1].order > reached)

    def ready(self) -> list[tuple[int, int]]:
        """Returns the segments whose replays can be evicted, each with the bytes that it holds, in order of need."""
        reached, positions = self.reached, {number: position for position, number in enumerate(self.announced)}
        items = sorted(
            self.with_replay.items(),
            key=lambda item: (
                positions.get(item[0], len(positions)),
                reached is not None and item[1].order > reached,
                -item[1].order,
            ),
        )
        return [(number, item.held_bytes or 0) for number, item in items]

    def to_be_live(self, room_bytes: int) -> list[tuple[int, _Segment]]:
        """Returns the segments that are to hold a replay within `room_bytes`, in the order of need (Rule 2)."""
        live = []
        beside = 0
        in_order = chain(self.next_requests(), self._to_come(), self.others_in_order_of_need())
        for number, segment in islice(in_order, MOST_AHEAD):
            if number is not None and segment.held_bytes is None and not segment.is_expected:
                continue
            # The sources of a segment that is not saved yet take room too; those of saved ones are charged already.
            room_bytes -= segment.live_bytes + (segment.source_bytes if number is None else 0)
            beside = max(beside, segment.beside_bytes)
            if room_bytes < beside:
                break
            if number is not None:
                live.append((number, segment))
        return live

    def _to_come(self) -> Iterator[tuple[None, _Segment]]:
        """Yields the segments of the previous forward that the present one has yet to save, last one first."""
        if self.reached is None:
            yield from ((None, segment) for segment in reversed(self.saved_before[len(self.saved) :]))


class Schedule:
    """The schedule of one worker. Event loop only.

    Each method except `next` and `last_needed` reports an event. `saved` comes first for a segment, `released` last.

    Attributes:
        held_bytes: The bytes that live replays and results of speculative backwards hold together.
    """

    def __init__(self) -> None:
        self.held_bytes = 0
        self._sessions: OrderedDict[Hashable, _Session] = OrderedDict()
        self._saved = 0

    def saved(self, key: Key, footprint: Footprint, source_bytes: int = 0) -> None:
        """Reports that a segment was saved.

        Args:
            key: The segment, with a number that is new in its session.
            footprint: The bytes that its executions take; an upper bound until it is `measured`.
            source_bytes: The bytes of those of its sources that no other segment names.
        """
        session = self._sessions.setdefault(key[0], _Session())
        if session.reached is not None:  # the first save after a backward begins the next forward
            session.reached = None
            session.saved_before, session.saved = session.saved, []
        self._saved += 1
        segment = session.segments[key[1]] = _Segment(self._saved, footprint, source_bytes)
        session.saved.append(segment)

    def released(self, key: Key) -> None:
        """Reports that a segment was released. It holds nothing any more."""
        self.started(key)
        session = self._sessions[key[0]]
        segment = session.segments.pop(key[1])
        if session.reached is None and segment in session.saved:
            # It was released before any backward, for example because its call was predicted wrongly. The next forward
            # must not expect such a segment.
            session.saved.remove(segment)

    def closed(self, session: Hashable) -> None:
        """Reports that a session has ended, with all its segments. Does nothing for an unknown session."""
        self._sessions.pop(session, None)

    def expected(self, key: Key) -> None:
        """Reports that the trainer will request a segment, perhaps once more. It may be replayed from now on."""
        self._segment(key).is_expected = True

    def announced(self, session: Hashable, numbers: Iterable[int]) -> None:
        """Reports which segments of a session the trainer will request next, the first of them first."""
        if session in self._sessions:
            self._sessions[session].announced = dict.fromkeys(numbers)

    def backward_predicted(self, key: Key) -> None:
        """Reports that the gradients of a segment's backward are predicted. That backward may run from now on."""
        segment = self._segment(key)
        segment.is_expected = segment.is_backward_predicted = True

    def requested(self, key: Key) -> None:
        """Reports that backward has reached a segment. It gets no more speculative work until `expected`."""
        segment = self._segment(key)
        self._sessions[key[0]].reached = segment.order
        self.abandoned(key)

    def abandoned(self, key: Key) -> None:
        """Reports that a segment's speculative work failed or is no longer needed. A request then runs without it."""
        segment = self._segment(key)
        segment.is_expected = segment.is_backward_predicted = False

    def measured(self, key: Key, footprint: Footprint) -> None:
        """Reports a measured footprint, which replaces the previous one."""
        self._segment(key).footprint = footprint

    def started(self, key: Key) -> None:
        """Reports that an execution of a segment begins. It takes the replay, so that can no longer be evicted."""
        segment = self._segment(key)
        self._count(key[0], -(segment.held_bytes or 0))
        self._sessions[key[0]].with_replay.pop(key[1], None)
        segment.held_bytes, segment.is_done = None, False

    def ready(self, key: Key, held_bytes: int, *, is_done: bool = False) -> None:
        """Reports that a segment holds bytes which may be evicted.

        Args:
            key: The segment that holds them.
            held_bytes: The bytes that it holds.
            is_done: Whether they are the results of a speculative backward rather than a replay.
        """
        segment = self._segment(key)
        segment.held_bytes, segment.is_done = held_bytes, is_done
        segment.is_backward_predicted = segment.is_backward_predicted and not is_done
        self._sessions[key[0]].with_replay[key[1]] = segment
        self._count(key[0], held_bytes)

    def dropped(self, key: Key) -> None:
        """Reports that a segment's replay or results were evicted, with its predicted backward."""
        self.started(key)
        self._segment(key).is_backward_predicted = False

    def next(self, room_bytes: int) -> ScheduledWork | None:
        """Returns the speculative work to do next, or None if there is none or no room for it.

        Args:
            room_bytes: The bytes that all replays may hold together, those that are ready included.
        """
        sharing = sum(1 for other in self._sessions.values() if other.segments)
        for name in self._sessions:
            step = self._next_of(name, room_bytes, sharing)
            if step is not None:
                self._sessions.move_to_end(name)
                return step
        return None

    def last_needed(self) -> Key:
        """Returns the replay to evict in favour of a request (Rule 5). At least one segment must hold a replay."""
        name, session = max(self._sessions.items(), key=lambda item: item[1].held_bytes)
        return name, session.ready()[-1][0]

    def _segment(self, key: Key) -> _Segment:
        return self._sessions[key[0]].segments[key[1]]

    def _count(self, session: Hashable, held_bytes: int) -> None:
        self._sessions[session].held_bytes += held_bytes
        self.held_bytes += held_bytes

    def _next_of(self, name: Hashable, room_bytes: int, sharing: int) -> ScheduledWork | None:
        session = self._sessions[name]
        # A session may keep its share, and also the room that no other session holds at present.
        share = room_bytes // sharing if session.segments else 0
        live = session.to_be_live(max(share, room_bytes - self.held_bytes + session.held_bytes))
        if session.reached is None:
            live.sort(key=lambda item: item[1].order if item[0] not in session.announced else 0)
        for number, segment in live:
            if segment.has_work:
                missing_bytes = self.held_bytes + segment.work_bytes - room_bytes
                if missing_bytes <= 0:
                    return ScheduledWork((name, number), ())
                numbers = {live_number for live_number, _ in live}
                own = [item for item in session.ready() if item[0] not in numbers]
                evicts = self._evictions(name, own, session.held_bytes + segment.work_bytes, missing_bytes)
                return None if evicts is None else ScheduledWork((name, number), evicts)
        return None

    def _evictions(
        self, name: Hashable, own: list[tuple[int, int]], own_bytes: int, missing_bytes: int
    ) -> tuple[Key, ...] | None:
        """Returns the replays to evict for speculative work of a session (Rule 4), or None if that is not possible.

        Args:
            name: The session that the speculative work is for.
            own: The session's own replays that it need not keep, with their bytes, in the order of need.
            own_bytes: The bytes that the session would hold with the new work.
            missing_bytes: The bytes to free.
        """
        ready = {other: session.ready() for other, session in self._sessions.items()} | {name: own}
        total = {other: session.held_bytes for other, session in self._sessions.items()} | {name: own_bytes}
        victims: list[Key] = []
        while missing_bytes > 0:
            giver = name if own else max(total, key=lambda other: (total[other], other == name))
            if giver == name and not own:  # no other session holds more than this one would
                return None
            number, size = ready[giver].pop()
            victims.append((giver, number))
            total[giver] -= size
            missing_bytes -= size
        return tuple(victims)
