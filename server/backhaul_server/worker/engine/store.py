"""What a worker holds, within a hard byte budget. Knows bytes and addresses, not tensors: they are opaque here.

NOTE [Room]
1. All tiers share the budget: tensors and programs that live segments name, those cached for later, work (what runs,
   and replays that are ready), finished results, answers on their way, sums of gradients, and what sessions and
   segments take themselves. What runs is charged with the most it takes, a replay that is ready with what it holds.
2. A segment is only accepted, and a tensor only let in, if beside all that can't be given up there is room for the
   largest run among the segments. One thing runs at a time; so a request for an accepted segment has room, if need be
   once an answer that is just being sent has gone.
3. Room is made by giving up, in this order: cached tensors (oldest first), replays that are ready (in the order that
   `Schedule` says), tensors that came for a segment to be saved, results nobody reads. Tensors of live segments are
   never given up, nor are sums, nor is what runs.
4. Incoming tensors are charged when they are declared, before memory is taken.
5. Memory that is shared with trainers is taken for good, where there is room for good. A tensor in it is charged as any
   other, and what is free in it too; so giving such a tensor up makes no room.
6. Every object that a client can make the worker keep is charged with a constant beside its bytes: otherwise ten
   thousand small objects would take memory that is not accounted for.

NOTE [Possession]
1. A session may name only what it has sent or been sent. For anything else the answer is that it is missing, whether
   the store holds it or not. So nobody learns from an address that another session has the tensor.
2. Sending the bytes is the proof of possession. Sessions that send equal tensors share one copy.
3. An entry lives as long as a session possesses it or a segment names it. A session that gives up its possession does
   not touch that of another session.
4. A cached tensor that is evicted is missing for all its owners. They learn that when they name it, and send it again.
5. Addresses are made against accidents: another tensor with the same address can be computed in seconds. So what an
   owner sends is compared with what others have stored there, and is refused if it is something else. Otherwise an
   owner could be given what another made to collide.
"""

import operator
from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from backhaul_runtime.errors import BudgetError, TransferError

T = TypeVar("T")
RETRY_AFTER_S = 1.0

ENTRY_BYTES = 2 << 10
"""What a tensor takes beside its elements: itself, its storage, its entry here. 0.8 KiB were measured."""

OWNER_BYTES = 512
"""What each further session that possesses it takes."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes by tier.

    Attributes:
        segments: Tensors and programs that live segments name, and what segments take beside them.
        cached: Tensors kept for later, arriving ones and what is free in shared memory included.
        working: What runs, and replays that are ready.
        results: Finished results, answers on their way, and sums of gradients.
        sessions: What sessions take beside all that.
        budget: All of them together never exceed it.
        refusals: Requests turned away for want of room.
        evictions: What was given up for want of room (Rule 3).
    """

    segments: int
    cached: int
    working: int
    results: int
    sessions: int
    budget: int
    refusals: int
    evictions: int


@dataclass(slots=True)
class _Entry(Generic[T]):
    value: T
    size_bytes: int
    references: int = 0  # of live segments, and of answers that send it
    owners: set[Hashable] = field(default_factory=set)
    is_awaited: bool = False  # it came for a segment that is not saved yet
    is_shared: bool = False


@dataclass(slots=True)
class _Possession:
    references: int = 0  # of the owner's segments
    is_kept: bool = False  # a later segment may name it, once these are gone
    named_bytes: int = 0  # as counted for the owner while there are references


@dataclass(slots=True)
class _Owner:
    possessions: dict[bytes, _Possession] = field(default_factory=dict)
    named_bytes: int = 0
    has_left: bool = False  # answers that are being sent may still hold something


@dataclass(slots=True)
class _Segment:
    owner: Hashable
    addresses: tuple[bytes, ...]
    need_bytes: int
    own_bytes: int


@dataclass
class Store(Generic[T]):
    """Tensors and programs by address, and the budget of everything else.

    An owner is a session.

    Attributes:
        budget_bytes: Limit of all tiers together.
        last_needed: Says which of the replays that are ready gives way (Rule 3). The oldest unless given.
        free_shared_bytes: What is free in memory that is shared with trainers (Rule 5).
        is_same: Whether two values of one address are equal, bit by bit.
    """

    budget_bytes: int
    last_needed: Callable[[], Hashable] | None = None
    free_shared_bytes: Callable[[], int] = lambda: 0
    is_same: Callable[[T, T], bool] = operator.eq
    _entries: dict[bytes, _Entry[T]] = field(default_factory=dict)
    _owners: dict[Hashable, _Owner] = field(default_factory=dict)
    # What no segment names, by how it can be given up; oldest first.
    _cached: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    _awaited: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    _shared: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    _segments: dict[Hashable, _Segment] = field(default_factory=dict)
    _needs: list[int] = field(default_factory=list)  # of all segments, sorted
    _ready: OrderedDict[Hashable, tuple[int, Callable[[], None]]] = field(default_factory=OrderedDict)
    _results: OrderedDict[Hashable, tuple[int, Callable[[], None] | None]] = field(default_factory=OrderedDict)
    _pinned: Counter[Hashable] = field(default_factory=Counter)
    _bytes: Counter[str] = field(default_factory=Counter)
    _pinned_bytes: int = 0
    _refusals: int = 0
    _evictions: int = 0

    def usage(self) -> Usage:
        """Bytes by tier, now."""
        count = self._bytes
        return Usage(
            segments=count["segments"],
            cached=count["cached"] + count["shared"] + count["arriving"] + self.free_shared_bytes(),
            working=count["running"] + count["ready"],
            results=count["results"] + count["sums"] + count["sending"],
            sessions=count["sessions"],
            budget=self.budget_bytes,
            refusals=self._refusals,
            evictions=self._evictions,
        )

    def held_bytes(self, owner: Hashable) -> int:
        """Of what an owner's segments name, each counted once."""
        found = self._owners.get(owner)
        return found.named_bytes if found is not None else 0

    # What is named by its contents

    def missing(self, owner: Hashable, addresses: Iterable[bytes]) -> list[bytes]:
        """Those that an owner does not possess, whether they are here or not, each once."""
        found = self._owners.get(owner)
        possessions = found.possessions if found is not None else {}
        return [address for address in dict.fromkeys(addresses) if address not in possessions]

    def is_named(self, owner: Hashable, address: bytes) -> bool:
        """Whether a live segment of an owner names it."""
        found = self._owners.get(owner)
        possession = found.possessions.get(address) if found is not None else None
        return possession is not None and possession.references > 0

    def value(self, address: bytes) -> T:
        """What is stored there. Raises KeyError."""
        entry = self._entries[address]
        if not entry.references:
            self._tier(entry).move_to_end(address)
        return entry.value

    def expect(self, size_bytes: int) -> None:
        """Charges what was declared (Rule 4); `arrived` or `abandon` follows. Raises BudgetError."""
        if not self._is_possible(size_bytes) or not self._fits(size_bytes):
            retry_after_s = RETRY_AFTER_S if size_bytes <= self.budget_bytes else 0.0
            self._refuse(f"a tensor or program of {size_bytes} bytes", size_bytes, retry_after_s)
        self._bytes["arriving"] += size_bytes

    def abandon(self, size_bytes: int) -> None:
        """Takes back what `expect` charged."""
        self._bytes["arriving"] -= size_bytes

    def arrived(self, owner: Hashable, address: bytes, value: T, size_bytes: int, *, is_shared: bool = False) -> None:
        """Stores what `expect` charged. Unnamed by any segment it is cached.

        Args:
            owner: Who sent it.
            address: Of it.
            value: Itself.
            size_bytes: As charged.
            is_shared: It lies in shared memory.

        Raises:
            TransferError: Another owner sent something else with the same address.
        """
        self.abandon(size_bytes)
        if self._collides(owner, address, value):
            raise TransferError(f"another session has sent something else with the address {address.hex()}")
        self._possess(owner, address, value, size_bytes, is_shared=is_shared, is_awaited=True)

    def cache(self, owner: Hashable, address: bytes, value: T, size_bytes: int) -> None:
        """Stores what is here already as part of something else; forgets it without room, or if it collides."""
        if not self._collides(owner, address, value):
            self._possess(owner, address, value, size_bytes)

    def _possess(
        self,
        owner: Hashable,
        address: bytes,
        value: T,
        size_bytes: int,
        *,
        is_shared: bool = False,
        is_awaited: bool = False,
    ) -> None:
        """Makes an owner possess what does not collide, if there is room."""
        entry = self._entries.get(address)
        if entry is not None and owner in entry.owners:
            return
        if entry is not None and self._fits(OWNER_BYTES, only_cached=True):
            entry = self._entries.get(address)  # room may have been made by giving it up
        if entry is not None:
            self._resize(entry, OWNER_BYTES)
        elif self._fits(size_bytes, only_cached=True):
            entry = self._entries[address] = _Entry(value, size_bytes, is_awaited=is_awaited, is_shared=is_shared)
            self._keep_cached(address, entry)
        else:
            return
        entry.owners.add(owner)
        self._owners.setdefault(owner, _Owner()).possessions[address] = _Possession()

    def _collides(self, owner: Hashable, address: bytes, value: T) -> bool:
        """Whether others possess something else with that address (Rule 5 of NOTE [Possession])."""
        entry = self._entries.get(address)
        return entry is not None and owner not in entry.owners and not self.is_same(entry.value, value)

    def give_up(self, owner: Hashable, addresses: Iterable[bytes]) -> None:
        """An owner will not name these again. What its segments name stays until they are gone."""
        found = self._owners.get(owner)
        possessions = found.possessions if found is not None else {}
        for address in addresses:
            possession = possessions.get(address)
            if possession is not None:
                possession.is_kept = False
                self._dispossess(owner, address, possession)

    def leave(self, owner: Hashable) -> None:
        """An owner whose segments are detached is gone, with all it possessed."""
        found = self._owners.get(owner)
        if found is not None:
            found.has_left = True
            self.give_up(owner, list(found.possessions))
            if not found.possessions:
                self._owners.pop(owner, None)

    def _dispossess(self, owner: Hashable, address: bytes, possession: _Possession) -> None:
        """Ends a possession, unless segments of the owner need it, and the entry with the last (Rule 3)."""
        if possession.references or possession.is_kept:
            return
        entry, found = self._entries[address], self._owners[owner]
        del found.possessions[address]
        if found.has_left and not found.possessions:
            self._owners.pop(owner, None)
        entry.owners.discard(owner)
        if entry.owners:
            self._resize(entry, -OWNER_BYTES)
        elif not entry.references:
            self._take_from_cache(address, entry)
            del self._entries[address]

    def _evict(self, address: bytes) -> None:
        """Gives a cached tensor up for all who possess it."""
        entry = self._entries.pop(address)
        self._take_from_cache(address, entry)
        for owner in entry.owners:
            del self._owners[owner].possessions[address]
        self._evictions += 1

    def _tier(self, entry: _Entry[T]) -> OrderedDict[bytes, None]:
        return self._shared if entry.is_shared else self._awaited if entry.is_awaited else self._cached

    def _keep_cached(self, address: bytes, entry: _Entry[T]) -> None:
        self._tier(entry)[address] = None
        self._bytes["shared" if entry.is_shared else "cached"] += entry.size_bytes

    def _take_from_cache(self, address: bytes, entry: _Entry[T]) -> None:
        del self._tier(entry)[address]
        self._bytes["shared" if entry.is_shared else "cached"] -= entry.size_bytes

    def _resize(self, entry: _Entry[T], added_bytes: int) -> None:
        entry.size_bytes += added_bytes
        tier = "segments" if entry.references else "shared" if entry.is_shared else "cached"
        self._bytes[tier] += added_bytes

    def oldest_shared(self, matches: Callable[[T], bool]) -> tuple[bytes, T] | None:
        """Of the cached tensors in shared memory that match, the one that was not used for longest."""
        shared = ((address, self._entries[address].value) for address in self._shared)
        return next(((address, value) for address, value in shared if matches(value)), None)

    def has_room(self, size_bytes: int) -> bool:
        """Whether so many bytes are free, with nothing given up, and can stay taken for good (Rule 2)."""
        return size_bytes <= self._free_bytes() and self._is_possible(size_bytes)

    def replace(self, address: bytes, value: T, copy: T) -> None:
        """Holds a copy in the stead of a cached tensor in shared memory, if that is still held."""
        entry = self._entries.get(address)
        if entry is not None and not entry.references and entry.value is value:
            self._take_from_cache(address, entry)
            entry.value, entry.is_shared = copy, False
            self._keep_cached(address, entry)

    # Segments

    def attach(
        self,
        segment: Hashable,
        owner: Hashable,
        addresses: Sequence[bytes],
        transient: Iterable[bytes],
        need_bytes: int,
        own_bytes: int = 0,
    ) -> int:
        """Lets a segment name what its owner possesses, and reserves room for its run (Rule 2).

        Args:
            segment: Its key.
            owner: Whose it is.
            addresses: What it names.
            transient: Those that go with the owner's last segment instead of being cached.
            need_bytes: What a run of it takes at most.
            own_bytes: What the segment itself takes.

        Returns:
            Bytes that are held for it alone: itself, and what no other segment names.

        Raises:
            BudgetError: With `retry_after_s` 0 where the segment would not fit alone.
        """
        names = tuple(dict.fromkeys(addresses))
        entries = [self._entries[address] for address in names]
        held = own_bytes + sum(entry.size_bytes for entry in entries)
        if held + need_bytes > self.budget_bytes:
            self._refuse(f"a segment of {held} bytes with a run of {need_bytes} more", held + need_bytes, 0.0)
        fresh = [(address, entry) for address, entry in zip(names, entries, strict=True) if not entry.references]
        added = sum(entry.size_bytes for _, entry in fresh)
        fixed = sum(entry.size_bytes for _, entry in fresh if entry.is_shared)
        if not self._is_possible(added - fixed + own_bytes, need_bytes):
            self._refuse(f"a segment of {added + own_bytes} bytes more", held + need_bytes, RETRY_AFTER_S)
        for address, entry in fresh:
            self._take_from_cache(address, entry)
        self._bytes["segments"] += added
        self._fits(own_bytes)  # it does, by Rule 2; what is named is no longer among what could be given up for it
        self._bytes["segments"] += own_bytes
        passing, found = set(transient), self._owners.setdefault(owner, _Owner())
        for address, entry in zip(names, entries, strict=True):
            entry.references += 1
            entry.is_awaited = False
            possession = found.possessions[address]
            if not possession.references:
                possession.named_bytes = entry.size_bytes
                found.named_bytes += entry.size_bytes
            possession.references += 1
            possession.is_kept |= address not in passing
        self._segments[segment] = _Segment(owner, names, need_bytes, own_bytes)
        insort(self._needs, need_bytes)
        return added + own_bytes

    def detach(self, segment: Hashable) -> None:
        """Lets a segment's tensors go; what other segments of its owner may want again is cached."""
        attached = self._segments.pop(segment)
        del self._needs[bisect_left(self._needs, attached.need_bytes)]
        self._bytes["segments"] -= attached.own_bytes
        found = self._owners.get(attached.owner, _Owner())
        for address in attached.addresses:
            entry, possession = self._entries[address], found.possessions[address]
            entry.references -= 1
            possession.references -= 1
            found.named_bytes -= 0 if possession.references else possession.named_bytes
            if not entry.references:
                self._bytes["segments"] -= entry.size_bytes
                self._keep_cached(address, entry)
            self._dispossess(attached.owner, address, possession)

    def resize(self, segment: Hashable, own_bytes: int) -> None:
        """A segment takes another number of bytes itself. Raises BudgetError."""
        attached = self._segments[segment]
        added = own_bytes - attached.own_bytes
        if added > 0 and (not self._is_possible(added) or not self._fits(added)):
            self._refuse(f"a segment that takes {own_bytes} bytes itself", added, RETRY_AFTER_S)
        self._bytes["segments"] += added
        attached.own_bytes = own_bytes

    def charge(self, what: str, size_bytes: int) -> None:
        """Charges what a session takes for itself; `refund` follows. Raises BudgetError."""
        if not self._is_possible(size_bytes) or not self._fits(size_bytes):
            self._refuse(what, size_bytes, RETRY_AFTER_S)
        self._bytes["sessions"] += size_bytes

    def refund(self, size_bytes: int) -> None:
        """Takes what `charge` charged back, or some of it."""
        self._bytes["sessions"] -= size_bytes

    # Work

    def start_run(self, segment: Hashable, most_bytes: int | None = None) -> int | None:
        """Charges a run of a segment, making room (Rule 3). A replay of it that is ready is in use from now on.

        Args:
            segment: Nothing is charged for one that was detached while its run waited.
            most_bytes: What it takes at most, with a replay that it uses; what it was attached with unless given.

        Returns:
            What `end_run` takes back; None where it has to wait for an answer that is being sent (Rule 2).
        """
        attached = self._segments.get(segment)
        if attached is None:
            return 0
        need = attached.need_bytes if most_bytes is None else min(most_bytes, attached.need_bytes)
        if need > self.budget_bytes - self._fixed_bytes() - self._bytes["running"]:
            return None
        self.let_go(segment)
        self._fits(need)
        self._bytes["running"] += need
        return need

    def end_run(self, need_bytes: int) -> None:
        """Takes the charge of a run back."""
        self._bytes["running"] -= need_bytes

    def keep_ready(self, segment: Hashable, size_bytes: int, drop: Callable[[], None]) -> None:
        """Charges what a replay ahead holds, or the backward that followed it, from when it ended.

        Args:
            segment: Its key.
            size_bytes: No more than its run was charged.
            drop: Called when its room is needed.
        """
        self._fits(size_bytes)
        self._ready[segment] = size_bytes, drop
        self._bytes["ready"] += size_bytes

    def let_go(self, segment: Hashable) -> None:
        """Takes the charge of what is ready back, if it is still there."""
        size, _ = self._ready.pop(segment, (0, None))
        self._bytes["ready"] -= size

    def drop_ready(self, segment: Hashable) -> None:
        """Gives up what is ready."""
        _, drop = self._ready[segment]
        self.let_go(segment)
        self._evictions += 1
        drop()

    def room_for_replays(self) -> int:
        """Bytes for all replays ahead together: what is left beside tensors, results and what runs."""
        kept = ("segments", "sessions", "arriving", "shared", "running", "results", "sending", "sums")
        return self.budget_bytes - sum(self._bytes[tier] for tier in kept) - self.free_shared_bytes()

    # Results

    def keep_result(self, key: Hashable, size_bytes: int, drop: Callable[[], None]) -> None:
        """Charges a finished result until `forget_result`, or until its room is needed and `drop` is called."""
        self._fits(size_bytes)
        self._results[key] = size_bytes, drop
        self._bytes["results"] += size_bytes
        self._pinned_bytes += size_bytes if self._pinned[key] else 0

    def forget_result(self, key: Hashable) -> None:
        """Takes the charge of a result back, if it is still there; of one that is pinned once it no longer is."""
        if key not in self._results:
            return
        size, _ = self._results[key]
        if self._pinned[key]:
            self._results[key] = size, None
        else:
            del self._results[key]
            self._bytes["results"] -= size

    def pin_result(self, key: Hashable) -> None:
        """Somebody reads a result, which therefore can't be given up. `unpin_result` follows."""
        self._pinned[key] += 1
        if self._pinned[key] == 1:
            self._pinned_bytes += self._results.get(key, (0, None))[0]

    def unpin_result(self, key: Hashable) -> None:
        """Nobody reads it any more."""
        self._pinned[key] -= 1
        if not self._pinned[key]:
            del self._pinned[key]
            size, drop = self._results.get(key, (0, pass_over))
            self._pinned_bytes -= size
            if drop is None:
                self.forget_result(key)

    def start_sending(self, size_bytes: int) -> None:
        """Charges copies of a result on their way to a trainer; `end_sending` follows.

        One answer at a time can be sent whatever else is held, or an accepted segment might have no answer.

        Raises:
            BudgetError: There is no room beside others that are being sent.
        """
        has_room = self._is_possible(size_bytes) and self._fits(size_bytes)
        if not has_room and self._bytes["sending"]:
            self._refuse(f"an answer of {size_bytes} bytes beside those that are being sent", size_bytes, RETRY_AFTER_S)
        self._bytes["sending"] += size_bytes

    def end_sending(self, size_bytes: int) -> None:
        """Takes the charge back."""
        self._bytes["sending"] -= size_bytes

    def keep_sums(self, size_bytes: int) -> bool:
        """Charges gradients that stay until `drop_sums`. Returns whether there is room; if not nothing is charged."""
        if not self._is_possible(size_bytes) or not self._fits(size_bytes):
            return False
        self._bytes["sums"] += size_bytes
        return True

    def drop_sums(self, size_bytes: int) -> None:
        """Takes what `keep_sums` charged back, or some of it."""
        self._bytes["sums"] -= size_bytes

    # Room

    def _is_possible(self, added_bytes: int, need_bytes: int = 0) -> bool:
        """Whether Rule 2 holds with so many bytes more, and a run that needs so many."""
        run = max(self._needs[-1] if self._needs else 0, need_bytes, self._bytes["running"])
        return self._fixed_bytes() + added_bytes + run <= self.budget_bytes

    def _fixed_bytes(self) -> int:
        """What can't be given up, but for what runs."""
        count = self._bytes
        shared = count["shared"] + self.free_shared_bytes()  # one becomes the other
        kept = count["segments"] + count["sessions"] + count["arriving"] + count["sending"] + count["sums"]
        return kept + shared + self._pinned_bytes

    def _free_bytes(self) -> int:
        return self.budget_bytes - sum(self._bytes.values()) - self.free_shared_bytes()

    def _fits(self, size_bytes: int, *, only_cached: bool = False) -> bool:
        """Whether so many bytes are free, after giving up what Rule 3 lets go, or only cached tensors."""
        free = self._free_bytes
        if free() >= size_bytes:
            return True
        while free() < size_bytes and self._cached:
            self._evict(next(iter(self._cached)))
        while free() < size_bytes and self._ready and not only_cached:
            self.drop_ready(self.last_needed() if self.last_needed is not None else next(iter(self._ready)))
        while free() < size_bytes and self._awaited:
            self._evict(next(iter(self._awaited)))
        for key in [] if only_cached or free() >= size_bytes else [k for k in self._results if not self._pinned[k]]:
            if free() >= size_bytes:
                break
            _, forgotten = self._results[key]
            self.forget_result(key)
            self._evictions += 1
            if forgotten is not None:
                forgotten()
        return free() >= size_bytes

    def _refuse(self, what: str, needed_bytes: int, retry_after_s: float) -> None:
        self._refusals += 1
        raise BudgetError(
            f"the worker's budget of {self.budget_bytes} bytes has no room for {what}; "
            f"{self._bytes['segments']} are held for segments. Give the worker more with "
            "--memory, or make segments smaller",
            needed_bytes=needed_bytes,
            budget_bytes=self.budget_bytes,
            retry_after_s=retry_after_s,
        )


def pass_over() -> None:
    """Stands for what is called when a result is given up, where there is none."""
