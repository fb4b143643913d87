"""What a worker holds, within a hard byte budget. Knows bytes and addresses, not tensors: they are opaque here.

NOTE [Room]
1. Five tiers share the budget: tensors that live segments name, tensors cached for later, work (what runs, and replays
   that are ready), finished results, and sums of gradients. What runs is charged with the most it takes, a replay that
   is ready with what it holds.
2. A segment is only accepted, and a tensor only let in, if beside all that can't be given up there is room for the
   largest run among the segments. One thing runs at a time; so a request for an accepted segment has room, if need be
   once an answer that is just being sent has gone.
3. Room is made by giving up, in this order: cached tensors (oldest first), replays that are ready (in the order that
   `Schedule` says), tensors that came for a segment to be saved, results nobody reads. Tensors of live segments are
   never given up, nor are sums, nor is what runs.
4. Incoming tensors are charged when they are declared, before memory is taken.
5. Memory that is shared with trainers is taken for good, where there is room for good. A tensor in it is charged as any
   other, and what is free in it too; so giving such a tensor up makes no room.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from backhaul_runtime.errors import BudgetError

T = TypeVar("T")
RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes by tier.

    Attributes:
        segments: Tensors that live segments name.
        cached: Tensors kept for later, arriving ones and what is free in shared memory included.
        working: What runs, and replays that are ready.
        results: Finished results, and sums of gradients.
        budget: All of them together never exceed it.
        refusals: Requests turned away for want of room.
        evictions: What was given up for want of room (Rule 3).
    """

    segments: int
    cached: int
    working: int
    results: int
    budget: int
    refusals: int
    evictions: int


@dataclass(slots=True)
class _Entry(Generic[T]):
    tensor: T
    size_bytes: int
    references: int = 0
    transient: bool = True
    is_awaited: bool = False  # it came for a segment that is not saved yet
    is_shared: bool = False

    @property
    def cached_tier(self) -> str:
        return "shared" if self.is_shared else "cached"


@dataclass(slots=True)
class _Segment:
    addresses: tuple[bytes, ...]
    need_bytes: int


@dataclass
class Store(Generic[T]):
    """Tensors by address, and the budget of everything else.

    Attributes:
        budget_bytes: Limit of all tiers together.
        last_needed: Says which of the replays that are ready gives way (Rule 3). The oldest unless given.
        free_shared_bytes: What is free in memory that is shared with trainers (Rule 5).
    """

    budget_bytes: int
    last_needed: Callable[[], Hashable] | None = None
    free_shared_bytes: Callable[[], int] = lambda: 0
    _entries: dict[bytes, _Entry[T]] = field(default_factory=dict)
    _cache: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    _segments: dict[Hashable, _Segment] = field(default_factory=dict)
    _ready: OrderedDict[Hashable, tuple[int, Callable[[], None]]] = field(default_factory=OrderedDict)
    _results: OrderedDict[Hashable, tuple[int, Callable[[], None] | None]] = field(default_factory=OrderedDict)
    _pinned: Counter[Hashable] = field(default_factory=Counter)
    _bytes: Counter[str] = field(default_factory=Counter)
    _refusals: int = 0
    _evictions: int = 0

    def usage(self) -> Usage:
        """Bytes by tier, now."""
        count = self._bytes
        return Usage(
            segments=count["segments"],
            cached=count["cached"] + count["shared"] + count["arriving"] + self.free_shared_bytes(),
            working=count["running"] + count["ready"],
            results=count["results"] + count["sums"],
            budget=self.budget_bytes,
            refusals=self._refusals,
            evictions=self._evictions,
        )

    def held_bytes(self, segments: Iterable[Hashable]) -> int:
        """Of the tensors that segments name, each counted once."""
        attached = (self._segments[segment].addresses for segment in segments if segment in self._segments)
        return sum(self._entries[address].size_bytes for address in {a for addresses in attached for a in addresses})

    def missing(self, addresses: Iterable[bytes]) -> list[bytes]:
        """Those that are not here, each once."""
        return [address for address in dict.fromkeys(addresses) if address not in self._entries]

    def tensor(self, address: bytes) -> T:
        """The tensor of that address. Raises KeyError."""
        if address in self._cache:
            self._cache.move_to_end(address)
        return self._entries[address].tensor

    def expect(self, size_bytes: int) -> None:
        """Charges a declared tensor (Rule 4); `arrived` or `abandon` follows. Raises BudgetError."""
        if not self._is_possible(size_bytes) or not self._fits(size_bytes):
            retry_after_s = RETRY_AFTER_S if size_bytes <= self.budget_bytes else 0.0
            self._refuse(f"a tensor of {size_bytes} bytes", size_bytes, retry_after_s)
        self._bytes["arriving"] += size_bytes

    def abandon(self, size_bytes: int) -> None:
        """Takes back what `expect` charged."""
        self._bytes["arriving"] -= size_bytes

    def arrived(self, address: bytes, tensor: T, size_bytes: int, *, is_shared: bool = False) -> None:
        """Stores a tensor that `expect` charged. Unnamed by any segment it is cached.

        Args:
            address: Of it.
            tensor: Itself.
            size_bytes: As charged.
            is_shared: It lies in shared memory.
        """
        self.abandon(size_bytes)
        self.cache(address, tensor, size_bytes, is_shared=is_shared)
        if address in self._cache:
            self._entries[address].is_awaited = True

    def cache(self, address: bytes, tensor: T, size_bytes: int, *, is_shared: bool = False) -> None:
        """Stores a tensor that is here already as part of something else, if there is room; else forgets it."""
        if address in self._entries or not self._fits(size_bytes, only_cached=True):
            return
        self._entries[address] = _Entry(tensor, size_bytes, is_shared=is_shared)
        self._keep_cached(address)

    def uncache(self, addresses: Iterable[bytes]) -> None:
        """Gives up cached tensors; those that segments name stay."""
        for address in addresses:
            if address in self._cache:
                self._take_from_cache(address)
                del self._entries[address]

    def _keep_cached(self, address: bytes) -> None:
        entry = self._entries[address]
        self._cache[address] = None
        self._bytes[entry.cached_tier] += entry.size_bytes

    def _take_from_cache(self, address: bytes) -> None:
        entry = self._entries[address]
        del self._cache[address]
        self._bytes[entry.cached_tier] -= entry.size_bytes

    def oldest_shared(self, matches: Callable[[T], bool]) -> tuple[bytes, T] | None:
        """Of the cached tensors in shared memory that match, the one that was not used for longest."""
        if not self._bytes["shared"]:
            return None
        shared = ((a, self._entries[a].tensor) for a in self._cache if self._entries[a].is_shared)
        return next(((address, tensor) for address, tensor in shared if matches(tensor)), None)

    def has_room(self, size_bytes: int) -> bool:
        """Whether so many bytes are free, with nothing given up, and can stay taken for good (Rule 2)."""
        return size_bytes <= self._free_bytes() and self._is_possible(size_bytes)

    def replace(self, address: bytes, tensor: T, copy: T) -> None:
        """Holds a copy in the stead of a cached tensor in shared memory, if that is still held."""
        entry = self._entries.get(address)
        if entry is not None and address in self._cache and entry.tensor is tensor:
            self._take_from_cache(address)
            entry.tensor, entry.is_shared = copy, False
            self._keep_cached(address)

    def attach(self, segment: Hashable, addresses: Sequence[bytes], transient: Iterable[bytes], need_bytes: int) -> int:
        """Lets a segment name tensors, all of which are here, and reserves room for its run (Rule 2).

        Args:
            segment: Its key.
            addresses: What it names.
            transient: Those that go with their last segment instead of being cached.
            need_bytes: What a run of it takes at most.

        Returns:
            Bytes of what no other segment names.

        Raises:
            BudgetError: With `retry_after_s` 0 where the segment would not fit alone.
        """
        names = tuple(dict.fromkeys(addresses))
        own = sum(self._entries[address].size_bytes for address in names)
        if own + need_bytes > self.budget_bytes:
            self._refuse(f"a segment of {own} bytes with a run of {need_bytes} more", own + need_bytes, 0.0)
        fresh = [address for address in names if self._entries[address].references == 0]
        added = sum(self._entries[address].size_bytes for address in fresh)
        fixed = sum(self._entries[address].size_bytes for address in fresh if self._entries[address].is_shared)
        if not self._is_possible(added - fixed, need_bytes):
            self._refuse(f"a segment of {added} bytes more", own + need_bytes, RETRY_AFTER_S)
        for address in fresh:
            self._take_from_cache(address)
        self._bytes["segments"] += added
        kept = set(names) - set(transient)
        for address in names:
            self._entries[address].references += 1
            self._entries[address].is_awaited = False
            if address in kept:
                self._entries[address].transient = False
        self._segments[segment] = _Segment(names, need_bytes)
        return added

    def detach(self, segment: Hashable) -> None:
        """Lets a segment's tensors go; what other segments may want again is cached."""
        for address in self._segments.pop(segment).addresses:
            entry = self._entries[address]
            entry.references -= 1
            if entry.references:
                continue
            self._bytes["segments"] -= entry.size_bytes
            if entry.transient:
                del self._entries[address]
            else:
                self._keep_cached(address)

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

    def give_up(self, segment: Hashable) -> None:
        """Drops what is ready."""
        _, drop = self._ready[segment]
        self.let_go(segment)
        self._evictions += 1
        drop()

    def room_for_replays(self) -> int:
        """Bytes for all replays ahead together: what is left beside tensors, results and what runs."""
        kept = ("segments", "arriving", "shared", "running", "results", "sums")
        return self.budget_bytes - sum(self._bytes[tier] for tier in kept) - self.free_shared_bytes()

    def keep_result(self, key: Hashable, size_bytes: int, drop: Callable[[], None]) -> None:
        """Charges a finished result until `forget_result`, or until its room is needed and `drop` is called."""
        self._fits(size_bytes)
        self._results[key] = size_bytes, drop
        self._bytes["results"] += size_bytes

    def forget_result(self, key: Hashable) -> None:
        """Takes the charge of a result back, if it is still there; of one that is pinned once it no longer is."""
        if key in self._results and self._pinned[key]:
            self._results[key] = self._results[key][0], None
            return
        size, _ = self._results.pop(key, (0, None))
        self._bytes["results"] -= size

    def pin_result(self, key: Hashable) -> None:
        """Somebody reads a result, which therefore can't be given up. `unpin_result` follows."""
        self._pinned[key] += 1

    def unpin_result(self, key: Hashable) -> None:
        """Nobody reads it any more."""
        self._pinned[key] -= 1
        if not self._pinned[key]:
            del self._pinned[key]
            if key in self._results and self._results[key][1] is None:
                self.forget_result(key)

    def keep_sums(self, size_bytes: int) -> bool:
        """Charges gradients that stay until `drop_sums`. Returns whether there is room; if not nothing is charged."""
        if not self._is_possible(size_bytes) or not self._fits(size_bytes):
            return False
        self._bytes["sums"] += size_bytes
        return True

    def drop_sums(self, size_bytes: int) -> None:
        """Takes what `keep_sums` charged back, or some of it."""
        self._bytes["sums"] -= size_bytes

    def clear_cache(self) -> None:
        """Gives up all that no segment names."""
        self.uncache(list(self._cache))

    def _is_possible(self, added_bytes: int, need_bytes: int = 0) -> bool:
        """Whether Rule 2 holds with so many bytes more, and a run that needs so many."""
        largest = max((segment.need_bytes for segment in self._segments.values()), default=0)
        run = max(largest, need_bytes, self._bytes["running"])
        return self._fixed_bytes() + added_bytes + run <= self.budget_bytes

    def _fixed_bytes(self) -> int:
        """What can't be given up, but for what runs."""
        pinned = sum(self._results[key][0] for key in self._pinned if key in self._results)
        shared = self._bytes["shared"] + self.free_shared_bytes()  # one becomes the other
        return self._bytes["segments"] + self._bytes["arriving"] + self._bytes["sums"] + shared + pinned

    def _free_bytes(self) -> int:
        return self.budget_bytes - sum(self._bytes.values()) - self.free_shared_bytes()

    def _fits(self, size_bytes: int, *, only_cached: bool = False) -> bool:
        """Whether so many bytes are free, after giving up what Rule 3 lets go, or only cached tensors."""
        free, entries = self._free_bytes, self._entries
        if free() >= size_bytes:
            return True

        def uncache(addresses: Iterable[bytes]) -> None:
            for address in addresses:
                if free() >= size_bytes:
                    break
                self.uncache([address])
                self._evictions += 1

        uncache([a for a in self._cache if not entries[a].is_awaited and not entries[a].is_shared])
        while free() < size_bytes and self._ready and not only_cached:
            self.give_up(self.last_needed() if self.last_needed is not None else next(iter(self._ready)))
        if free() < size_bytes:
            uncache([a for a in self._cache if not entries[a].is_shared])
        for key in [] if only_cached else [key for key in self._results if not self._pinned[key]]:
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
            f"the worker's budget of {self.budget_bytes} bytes has no room for {what}; {self._bytes['segments']} are "
            "held for segments. Give the worker more with --memory, or make segments smaller",
            needed_bytes=needed_bytes,
            budget_bytes=self.budget_bytes,
            retry_after_s=retry_after_s,
        )
