"""What a worker recomputes ahead of its request, and what gives way. Pure: no tensors, threads or clocks.

NOTE [Order of need]
1. Backward needs first what was saved last. Once it has reached a segment it goes on to those saved before that one.
2. What is needed first is kept ready, as far as room goes. Room is left for what forward has yet to save, by what it
   saved the last time, and for what one of them takes beside while it runs: nothing is made only to be given up.
3. Of what is to be kept, forward has it replayed as it was saved, backward in the order of need.
4. Work ahead takes room from what the same session needs later, then from sessions that hold more than its own would.
5. Work that is demanded takes room from the session that holds most: what that one needs last.
6. Sessions take turns.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice

Key = tuple[Hashable, int]
"""A session and a segment in it."""

MOST_AHEAD = 1024
"""Segments of a session that are looked at for work ahead, however many it has: each turn looks at them anew."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a segment takes on a worker beside what it was saved with.

    Attributes:
        replay_bytes: At most, while it is replayed.
        ready_bytes: Once it has been: what autograd saved.
        backward_bytes: At most, while its backward runs on that; what autograd saved included.
    """

    replay_bytes: int
    ready_bytes: int
    backward_bytes: int

    @property
    def run_bytes(self) -> int:
        """At most, from nothing to gradients."""
        return max(self.replay_bytes, self.backward_bytes)

    def beside(self, other_bytes: int) -> "Footprint":
        """The footprint with so many bytes more that are taken all the time."""
        return Footprint(
            self.replay_bytes + other_bytes, self.ready_bytes + other_bytes, self.backward_bytes + other_bytes
        )


@dataclass(frozen=True, slots=True)
class ScheduledWork:
    """The next work ahead.

    Attributes:
        key: Replay this segment, or run the backward that was guessed.
        evicts: Replays to be given up first.
    """

    key: Key
    evicts: tuple[Key, ...]


@dataclass(slots=True, eq=False)
class _Segment:
    order: int
    footprint: Footprint
    source_bytes: int = 0
    is_expected: bool = False
    is_backward_predicted: bool = False
    is_done: bool = False
    held_bytes: int | None = None

    @property
    def kept_bytes(self) -> int:
        return self.footprint.ready_bytes if self.held_bytes is None else self.held_bytes

    @property
    def beside_bytes(self) -> int:
        """The bytes that are used while it runs and freed afterwards."""
        return 0 if self.is_done else max(0, self.footprint.run_bytes - self.kept_bytes)

    @property
    def has_work(self) -> bool:
        return self.is_expected if self.held_bytes is None else self.is_backward_predicted

    @property
    def work_bytes(self) -> int:
        """What its work takes beside what it holds already."""
        return self.footprint.replay_bytes if self.held_bytes is None else self.beside_bytes


@dataclass(slots=True)
class _Session:
    segments: dict[int, _Segment] = field(default_factory=dict)
    with_replay: dict[int, _Segment] = field(default_factory=dict)  # those of them that hold something
    held_bytes: int = 0
    reached: int | None = None  # by backward; None while forward goes on
    saved: list[_Segment] = field(default_factory=list)  # by this forward
    saved_before: list[_Segment] = field(default_factory=list)  # by the one before

    def in_order_of_need(self) -> Iterator[tuple[int, _Segment]]:
        reached = self.reached
        if reached is not None:
            yield from (item for item in reversed(self.segments.items()) if item[1].order <= reached)
        yield from (item for item in reversed(self.segments.items()) if reached is None or item[1].order > reached)

    def ready(self) -> list[tuple[int, int]]:
        """What can be given up, with its bytes, in order of need."""
        reached = self.reached
        items = sorted(
            self.with_replay.items(),
            key=lambda item: (reached is not None and item[1].order > reached, -item[1].order),
        )
        return [(number, item.held_bytes or 0) for number, item in items]

    def to_be_kept(self, room_bytes: int) -> list[tuple[int, _Segment]]:
        """Rule 2."""
        kept = []
        beside = 0
        for number, segment in islice(chain(self._to_come(), self.in_order_of_need()), MOST_AHEAD):
            if number is not None and segment.held_bytes is None and not segment.is_expected:
                continue
            room_bytes -= segment.kept_bytes + (segment.source_bytes if number is None else 0)
            beside = max(beside, segment.beside_bytes)
            if room_bytes < beside:
                break
            if number is not None:
                kept.append((number, segment))
        return kept

    def _to_come(self) -> Iterator[tuple[None, _Segment]]:
        if self.reached is None:
            yield from ((None, segment) for segment in reversed(self.saved_before[len(self.saved) :]))


class Schedule:
    """Of one worker. Each method but `next` and `last_needed` tells of an event.

    Attributes:
        held_bytes: The bytes of all live replays.
    """

    def __init__(self) -> None:
        self.held_bytes = 0
        self._sessions: OrderedDict[Hashable, _Session] = OrderedDict()
        self._saved = 0

    def saved(self, key: Key, footprint: Footprint, source_bytes: int = 0) -> None:
        """A segment is there. So many bytes had to be kept for it that were not needed before."""
        session = self._sessions.setdefault(key[0], _Session())
        if session.reached is not None:
            session.reached = None
            session.saved_before, session.saved = session.saved, []
        self._saved += 1
        segment = session.segments[key[1]] = _Segment(self._saved, footprint, source_bytes)
        session.saved.append(segment)

    def released(self, key: Key) -> None:
        """Nobody needs it any more, and it holds nothing."""
        self.started(key)
        session = self._sessions[key[0]]
        segment = session.segments.pop(key[1])
        if session.reached is None and segment in session.saved:
            session.saved.remove(segment)  # without a backward: it was another, or there is none

    def closed(self, session: Hashable) -> None:
        """A session has ended, all its segments are released."""
        self._sessions.pop(session, None)

    def expected(self, key: Key) -> None:
        """It will be asked for, perhaps once more: it may be replayed from now on."""
        self._segment(key).is_expected = True

    def backward_predicted(self, key: Key) -> None:
        """It is known what its backward will probably start from: that can be run ahead too."""
        segment = self._segment(key)
        segment.is_expected = segment.is_backward_predicted = True

    def requested(self, key: Key) -> None:
        """Backward has reached it. No work ahead is done for it unless it is wanted again."""
        segment = self._segment(key)
        self._sessions[key[0]].reached = segment.order
        self.abandoned(key)

    def abandoned(self, key: Key) -> None:
        """Work ahead failed, or is no longer needed: its request will do without."""
        segment = self._segment(key)
        segment.is_expected = segment.is_backward_predicted = False

    def measured(self, key: Key, footprint: Footprint) -> None:
        """It takes something else than was said."""
        self._segment(key).footprint = footprint

    def started(self, key: Key) -> None:
        """It runs: what was ready is in use."""
        segment = self._segment(key)
        self._count(key[0], -(segment.held_bytes or 0))
        self._sessions[key[0]].with_replay.pop(key[1], None)
        segment.held_bytes, segment.is_done = None, False

    def ready(self, key: Key, held_bytes: int, *, is_done: bool = False) -> None:
        """It holds so much from now on, and can be given up: a replay, or, done, what a guessed backward gave."""
        segment = self._segment(key)
        segment.held_bytes, segment.is_done = held_bytes, is_done
        segment.is_backward_predicted = segment.is_backward_predicted and not is_done
        self._sessions[key[0]].with_replay[key[1]] = segment
        self._count(key[0], held_bytes)

    def dropped(self, key: Key) -> None:
        """What was ready was given up, with what had been guessed."""
        self.started(key)
        self._segment(key).is_backward_predicted = False

    def next(self, room_bytes: int) -> ScheduledWork | None:
        """What to do ahead now, if anything.

        Args:
            room_bytes: For all replays together, those that are ready included.
        """
        sharing = sum(1 for other in self._sessions.values() if other.segments)
        for name in self._sessions:
            step = self._next_of(name, room_bytes, sharing)
            if step is not None:
                self._sessions.move_to_end(name)
                return step
        return None

    def last_needed(self) -> Key:
        """The replay to drop in favour of a request (Rule 5). There is at least one replay."""
        name, session = max(self._sessions.items(), key=lambda item: item[1].held_bytes)
        return name, session.ready()[-1][0]

    def _segment(self, key: Key) -> _Segment:
        return self._sessions[key[0]].segments[key[1]]

    def _count(self, session: Hashable, held_bytes: int) -> None:
        self._sessions[session].held_bytes += held_bytes
        self.held_bytes += held_bytes

    def _next_of(self, name: Hashable, room_bytes: int, sharing: int) -> ScheduledWork | None:
        session = self._sessions[name]
        share = room_bytes // sharing if session.segments else 0
        kept = session.to_be_kept(max(share, room_bytes - self.held_bytes + session.held_bytes))
        if session.reached is None:
            kept.reverse()
        for number, segment in kept:
            if segment.has_work:
                missing_bytes = self.held_bytes + segment.work_bytes - room_bytes
                if missing_bytes <= 0:
                    return ScheduledWork((name, number), ())
                numbers = {kept_number for kept_number, _ in kept}
                own = [item for item in session.ready() if item[0] not in numbers]
                evicts = self._evictions(name, own, session.held_bytes + segment.work_bytes, missing_bytes)
                return None if evicts is None else ScheduledWork((name, number), evicts)
        return None

    def _evictions(
        self, name: Hashable, own: list[tuple[int, int]], own_bytes: int, missing_bytes: int
    ) -> tuple[Key, ...] | None:
        """Rule 4. None where that is not enough.

        Args:
            name: The name of the session.
            own: What it holds and need not keep, with bytes, in order of need.
            own_bytes: All that it would hold.
            missing_bytes: How much is to be given up.
        """
        ready = {other: session.ready() for other, session in self._sessions.items()} | {name: own}
        total = {other: session.held_bytes for other, session in self._sessions.items()} | {name: own_bytes}
        victims: list[Key] = []
        while missing_bytes > 0:
            giver = name if own else max(total, key=lambda other: (total[other], other == name))
            if giver == name and not own:
                return None
            number, size = ready[giver].pop()
            victims.append((giver, number))
            total[giver] -= size
            missing_bytes -= size
        return tuple(victims)
