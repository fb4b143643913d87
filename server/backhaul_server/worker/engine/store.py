"""The memory accounts of a worker: what it holds, within a hard budget in bytes.

The store knows bytes and addresses. Tensors and programs are opaque to it. Event loop only.

NOTE [Room]
1. All tiers share the budget: tensors and programs that live segments name, those cached for later, work (what runs,
   and replays that are ready), finished results, answers that are being sent, gradient sums, the sessions and segments
   themselves, and the reserve for what the device takes beside all of these (NOTE [Reserve]). An execution is charged
   with the most it can take, a replay that is ready with what it holds.
2. A segment or a tensor is accepted only if the largest execution among the segments still fits beside everything that
   cannot be evicted. One execution happens at a time. So a request for an accepted segment always has room, if need be
   after the answer that is being sent has gone. A reserve that has grown since does not delay it.
3. Room is made by evicting, in this order: cached tensors (oldest first), replays that are ready (in the order of
   `Schedule`), tensors that arrived for a segment that is not saved yet, and results that no answer reads. Tensors of
   live segments, gradient sums and the execution in progress are never evicted.
4. Incoming tensors are charged when they are declared, before their memory is allocated.
5. Memory shared with trainers is taken permanently, and only where there is permanent room. A tensor in it is charged
   like any other, and so is its free part. Evicting such a tensor therefore makes no room.
6. The quotas of a credential bound what its sessions keep that cannot be evicted, and what is on its way (see
   `Account`).
7. Every object that a client can make the worker keep is charged with a constant beside its bytes: otherwise ten
   thousand small objects would take memory that is not accounted for.

NOTE [Possession]
1. A session may name only what it has sent or has been sent. Anything else is reported as missing, whether the store
   holds it or not. So no session learns from an address that another session has the tensor.
2. Sending the bytes is the proof of possession. Sessions of one credential that send equal tensors share one copy.
   Sessions of different credentials share nothing.
3. An entry lives as long as a session possesses it or a segment names it. A session that gives up its possession does
   not affect that of another session.
4. A cached tensor that is evicted is missing for all its owners. They learn that when they name it, and send it again.
5. Addresses protect against accidents only: another tensor with the same address can be computed in seconds. So the
   bytes that an owner sends are compared with those that others have stored under the address, and refused if they
   differ. Otherwise an owner could receive a tensor that another had made to collide.
"""

import operator
from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from backhaul_runtime.errors import BudgetError, TransferError
from backhaul_server.worker.accounts import RETRY_AFTER_S, Account, Owner

T = TypeVar("T")
Name = tuple[Account, bytes]
"""Names a tensor or program in the store: the account of the sessions that possess it, and its address."""

ENTRY_BYTES = 2 << 10
"""Bytes of a tensor beside its elements: the object, its storage, its entry here. 0.8 KiB were measured."""

OWNER_BYTES = 512
"""Bytes of an entry for each further session that possesses it."""


_TIERS = (
    "segments",
    "sessions",
    "arriving",
    "cached",
    "shared",
    "running",
    "ready",
    "results",
    "sums",
    "sending",
    "reserve",
)
_HELD, _INFLIGHT = frozenset({"segments", "sessions", "arriving", "sums"}), frozenset({"arriving", "sending"})
"""Tiers that the quotas of a credential count: what cannot be evicted, and what is on its way."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes by tier.

    Attributes:
        segments: Bytes of the tensors and programs that live segments name, and of the segments themselves.
        cached: Bytes of tensors kept for later, with arriving tensors and the free part of shared memory.
        working: Bytes of the execution in progress and of replays that are ready.
        results: Bytes of finished results, of answers that are being sent, and of gradient sums.
        sessions: Bytes of the sessions themselves.
        reserve: Bytes that the device takes beside all that is charged.
        budget: Bytes that all tiers together never exceed.
        refusals: Number of requests that were refused because memory was short.
        evictions: Number of tensors, replays and results that were evicted (Rule 3).
    """

    segments: int
    cached: int
    working: int
    results: int
    sessions: int
    reserve: int
    budget: int
    refusals: int
    evictions: int


@dataclass(slots=True)
class _Entry(Generic[T]):
    account: Account
    value: T
    size_bytes: int
    references: int = 0  # live segments that name it, and answers that send it
    owners: set[Owner] = field(default_factory=set)
    is_awaited: bool = False  # it arrived for a segment that is not saved yet
    is_shared: bool = False


@dataclass(slots=True)
class _Possession:
    references: int = 0  # the owner's segments that name the entry
    stays_cached: bool = False  # it stays cached when no segment names it, for a later one
    named_bytes: int = 0  # what the owner is counted with while there are references


@dataclass(slots=True)
class _OwnerState:
    possessions: dict[bytes, _Possession] = field(default_factory=dict)
    named_bytes: int = 0
    has_left: bool = False  # the session has ended, but answers that are being sent may still hold tensors


@dataclass(slots=True)
class _Segment:
    owner: Owner
    addresses: tuple[bytes, ...]
    need_bytes: int
    own_bytes: int


@dataclass
class Store(Generic[T]):
    """Tensors and programs by address, and the accounts of everything else that a worker holds.

    Event loop only.

    Attributes:
        budget_bytes: Upper bound of the bytes of all tiers together.
        last_needed: Returns the key of the replay to evict first (Rule 3); None to evict the oldest.
        free_shared_bytes: Returns the bytes that are free in memory shared with trainers (Rule 5).
        is_same: Returns whether two values of one address are known to be equal, bit by bit.
        measure_reserve: Returns the bytes of the reserve, given those that are charged in all. Called while nothing
            runs.
    """

    budget_bytes: int
    last_needed: Callable[[], Hashable] | None = None
    free_shared_bytes: Callable[[], int] = lambda: 0
    is_same: Callable[[T, T], bool] = operator.eq
    measure_reserve: Callable[[int], int] = lambda charged_bytes: 0
    _entries: dict[Name, _Entry[T]] = field(default_factory=dict)
    _owners: dict[Owner, _OwnerState] = field(default_factory=dict)
    # Those that no segment names, by the tier that decides when they are evicted; oldest first.
    _cached: OrderedDict[Name, None] = field(default_factory=OrderedDict)
    _awaited: OrderedDict[Name, None] = field(default_factory=OrderedDict)
    _shared: OrderedDict[Name, None] = field(default_factory=OrderedDict)
    _segments: dict[Hashable, _Segment] = field(default_factory=dict)
    _needs: list[int] = field(default_factory=list)  # of all segments, sorted
    _ready: OrderedDict[Hashable, tuple[int, Callable[[], None]]] = field(default_factory=OrderedDict)
    _results: OrderedDict[Hashable, tuple[int, Callable[[], None] | None]] = field(default_factory=OrderedDict)
    _pinned: Counter[Hashable] = field(default_factory=Counter)
    _bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_TIERS, 0))
    _pinned_bytes: int = 0
    _refusals: int = 0
    _evictions: int = 0

    def usage(self) -> Usage:
        """Returns the present bytes of each tier."""
        count = self._bytes
        return Usage(
            segments=count["segments"],
            cached=count["cached"] + count["shared"] + count["arriving"] + self.free_shared_bytes(),
            working=count["running"] + count["ready"],
            results=count["results"] + count["sums"] + count["sending"],
            sessions=count["sessions"],
            reserve=count["reserve"],
            budget=self.budget_bytes,
            refusals=self._refusals,
            evictions=self._evictions,
        )

    def held_bytes(self, owner: Owner) -> int:
        """Returns the bytes of all that an owner's segments name, each tensor counted once."""
        return self._owners.get(owner, _OwnerState()).named_bytes

    # Tensors and programs

    def missing(self, owner: Owner, addresses: Iterable[bytes]) -> list[bytes]:
        """Returns the addresses that an owner does not possess, each once. They may be stored for other owners."""
        possessions = self._owners.get(owner, _OwnerState()).possessions
        return [address for address in dict.fromkeys(addresses) if address not in possessions]

    def is_named(self, owner: Owner, address: bytes) -> bool:
        """Whether a live segment of an owner names the address."""
        possession = self._owners.get(owner, _OwnerState()).possessions.get(address)
        return possession is not None and possession.references > 0

    def value(self, owner: Owner, address: bytes) -> T:
        """Returns the value at an address, and marks a cached one as just used. Raises KeyError."""
        name = owner.account, address
        entry = self._entries[name]
        if not entry.references:
            self._tier(entry).move_to_end(name)
        return entry.value

    def expect(self, owner: Owner, size_bytes: int) -> None:
        """Charges a declared tensor or program (Rule 4). Call `arrived` or `abandon` next. Raises BudgetError."""
        owner.account.check_inflight(size_bytes)
        owner.account.check_memory(size_bytes)
        if not self._keeps_execution_possible(size_bytes) or not self._make_room(size_bytes):
            retry_after_s = RETRY_AFTER_S if size_bytes <= self.budget_bytes else 0.0
            self._refuse(f"a tensor or program of {size_bytes} bytes", size_bytes, retry_after_s)
        self._count(owner.account, "arriving", size_bytes)

    def abandon(self, owner: Owner, size_bytes: int) -> None:
        """Refunds what `expect` charged."""
        self._count(owner.account, "arriving", -size_bytes)

    def of_others(self, owner: Owner, address: bytes) -> T | None:
        """Returns the value at an address that only other owners possess, with which `arrived` compares another."""
        entry = self._entries.get((owner.account, address))
        return None if entry is None or owner in entry.owners else entry.value

    def arrived(
        self,
        owner: Owner,
        address: bytes,
        value: T,
        size_bytes: int,
        *,
        is_shared: bool = False,
        known_equal: T | None = None,
    ) -> None:
        """Stores a value that `expect` charged. It is cached until a segment names it.

        Args:
            owner: The session that sent the value.
            address: The address that names the value's contents.
            value: The tensor or program; the store keeps a reference.
            size_bytes: The bytes that `expect` charged.
            is_shared: Whether the value lies in memory shared with the trainer.
            known_equal: The value of `of_others`, if the caller knows that it is equal.

        Raises:
            TransferError: Another owner has sent a different value with the same address.
        """
        self.abandon(owner, size_bytes)
        if self._collides(owner, address, value, known_equal):
            raise collision(address)
        self._possess(owner, address, value, size_bytes, is_shared=is_shared, is_awaited=True)

    def cache(self, owner: Owner, address: bytes, value: T, size_bytes: int) -> None:
        """Stores a value that the worker has computed.

        Does nothing if there is no room, or if others possess a value that is not known to be equal at the address.
        """
        if not self._collides(owner, address, value):
            self._possess(owner, address, value, size_bytes)

    def _possess(
        self,
        owner: Owner,
        address: bytes,
        value: T,
        size_bytes: int,
        *,
        is_shared: bool = False,
        is_awaited: bool = False,
    ) -> None:
        """Makes an owner possess a value that does not collide, if there is room."""
        name = owner.account, address
        entry = self._entries.get(name)
        if entry is not None and owner in entry.owners:
            return
        if entry is not None and self._make_room(OWNER_BYTES, only_cached=True):
            entry = self._entries.get(name)  # making room may have evicted this very entry
        if entry is not None:
            self._resize(entry, OWNER_BYTES)
        elif self._make_room(size_bytes, only_cached=True):
            entry = _Entry(owner.account, value, size_bytes, is_awaited=is_awaited, is_shared=is_shared)
            self._entries[name] = entry
            self._keep_cached(name, entry)
        else:
            return
        entry.owners.add(owner)
        self._owners.setdefault(owner, _OwnerState()).possessions[address] = _Possession()

    def _collides(self, owner: Owner, address: bytes, value: T, known_equal: T | None = None) -> bool:
        """Whether other owners possess a different value at the address (Rule 5 of NOTE [Possession])."""
        present = self.of_others(owner, address)
        return present is not None and present is not known_equal and not self.is_same(present, value)

    def disown(self, owner: Owner, addresses: Iterable[bytes]) -> None:
        """Ends an owner's possession. Tensors that its segments name stay until these are detached."""
        possessions = self._owners.get(owner, _OwnerState()).possessions
        for address in addresses:
            possession = possessions.get(address)
            if possession is not None:
                possession.stays_cached = False
                self._dispossess(owner, address, possession)

    def remove_owner(self, owner: Owner) -> None:
        """Ends all possessions of an owner whose segments are detached."""
        state = self._owners.get(owner)
        if state is not None:
            state.has_left = True
            self.disown(owner, list(state.possessions))
            if not state.possessions:
                self._owners.pop(owner, None)

    def _dispossess(self, owner: Owner, address: bytes, possession: _Possession) -> None:
        """Ends a possession unless segments of the owner need it. The entry goes with its last owner (Rule 3)."""
        if possession.references or possession.stays_cached:
            return
        name, state = (owner.account, address), self._owners[owner]
        entry = self._entries[name]
        del state.possessions[address]
        if state.has_left and not state.possessions:
            self._owners.pop(owner, None)
        entry.owners.discard(owner)
        if entry.owners:
            self._resize(entry, -OWNER_BYTES)
        elif not entry.references:
            self._take_from_cache(name, entry)
            del self._entries[name]

    def _evict(self, name: Name) -> None:
        """Frees a cached tensor; it is then missing for all of its owners."""
        entry = self._entries.pop(name)
        self._take_from_cache(name, entry)
        for owner in entry.owners:
            del self._owners[owner].possessions[name[1]]
        self._evictions += 1

    def _tier(self, entry: _Entry[T]) -> OrderedDict[Name, None]:
        return self._shared if entry.is_shared else self._awaited if entry.is_awaited else self._cached

    def _keep_cached(self, name: Name, entry: _Entry[T]) -> None:
        self._tier(entry)[name] = None
        self._bytes["shared" if entry.is_shared else "cached"] += entry.size_bytes

    def _take_from_cache(self, name: Name, entry: _Entry[T]) -> None:
        del self._tier(entry)[name]
        self._bytes["shared" if entry.is_shared else "cached"] -= entry.size_bytes

    def _resize(self, entry: _Entry[T], added_bytes: int) -> None:
        entry.size_bytes += added_bytes
        tier = "segments" if entry.references else "shared" if entry.is_shared else "cached"
        self._count(entry.account, tier, added_bytes)

    def oldest_shared(self, matches: Callable[[T], bool]) -> tuple[Name, T] | None:
        """Returns the least recently used of the cached tensors in shared memory that match, with its name."""
        shared = ((name, self._entries[name].value) for name in self._shared)
        return next(((name, value) for name, value in shared if matches(value)), None)

    def has_room(self, size_bytes: int) -> bool:
        """Whether this many bytes are free without evictions, and can be taken permanently (Rule 2)."""
        return size_bytes <= self._free_bytes() and self._keeps_execution_possible(size_bytes)

    def replace(self, name: Name, value: T, copy: T) -> None:
        """Replaces a cached tensor in shared memory by its copy, if that tensor is still stored."""
        entry = self._entries.get(name)
        if entry is not None and not entry.references and entry.value is value:
            self._take_from_cache(name, entry)
            entry.value, entry.is_shared = copy, False
            self._keep_cached(name, entry)

    # Segments

    def attach(
        self,
        segment: Hashable,
        owner: Owner,
        addresses: Sequence[bytes],
        transient: Iterable[bytes],
        need_bytes: int,
        own_bytes: int = 0,
    ) -> int:
        """Lets a segment name tensors and programs that its owner possesses, and reserves room to execute it (Rule 2).

        Args:
            segment: The key of the segment.
            owner: The session of the segment.
            addresses: Program and tensors that the segment names.
            transient: Those of the addresses that are freed with the owner's last segment instead of being cached.
            need_bytes: Upper bound of the bytes that an execution takes.
            own_bytes: Bytes of the segment itself.

        Returns:
            Bytes that are held for this segment alone: its own, and those of what no other segment names.

        Raises:
            BudgetError: There is no room; `retry_after_s` is 0 if the segment would not fit even alone.
        """
        names = tuple(dict.fromkeys(addresses))
        account = owner.account
        entries = [self._entries[account, address] for address in names]
        held = own_bytes + sum(entry.size_bytes for entry in entries)
        if held + need_bytes > self.budget_bytes:
            self._refuse(f"a segment of {held} bytes with an execution of {need_bytes} more", held + need_bytes, 0.0)
        fresh = [(address, entry) for address, entry in zip(names, entries, strict=True) if not entry.references]
        added = sum(entry.size_bytes for _, entry in fresh)
        fixed = sum(entry.size_bytes for _, entry in fresh if entry.is_shared)
        account.check_memory(added + own_bytes)
        if not self._keeps_execution_possible(added - fixed + own_bytes, need_bytes):
            self._refuse(f"a segment of {added + own_bytes} bytes more", held + need_bytes, RETRY_AFTER_S)
        for address, entry in fresh:
            self._take_from_cache((account, address), entry)
        self._count(account, "segments", added)
        self._make_room(own_bytes)  # succeeds by Rule 2, and can no longer evict what the segment names
        self._count(account, "segments", own_bytes)
        transient_addresses, state = set(transient), self._owners.setdefault(owner, _OwnerState())
        for address, entry in zip(names, entries, strict=True):
            entry.references += 1
            entry.is_awaited = False
            possession = state.possessions[address]
            if not possession.references:
                possession.named_bytes = entry.size_bytes
                state.named_bytes += entry.size_bytes
            possession.references += 1
            possession.stays_cached |= address not in transient_addresses
        self._segments[segment] = _Segment(owner, names, need_bytes, own_bytes)
        insort(self._needs, need_bytes)
        return added + own_bytes

    def detach(self, segment: Hashable) -> None:
        """Ends what `attach` began. Tensors that later segments of the owner may name stay cached."""
        attached = self._segments.pop(segment)
        del self._needs[bisect_left(self._needs, attached.need_bytes)]
        account = attached.owner.account
        self._count(account, "segments", -attached.own_bytes)
        state = self._owners.get(attached.owner, _OwnerState())
        for address in attached.addresses:
            entry, possession = self._entries[account, address], state.possessions[address]
            entry.references -= 1
            possession.references -= 1
            state.named_bytes -= 0 if possession.references else possession.named_bytes
            if not entry.references:
                self._count(account, "segments", -entry.size_bytes)
                self._keep_cached((account, address), entry)
            self._dispossess(attached.owner, address, possession)

    def resize(self, segment: Hashable, own_bytes: int) -> None:
        """Changes the bytes of a segment itself. Raises BudgetError."""
        attached = self._segments[segment]
        added, account = own_bytes - attached.own_bytes, attached.owner.account
        if added > 0:
            account.check_memory(added)
        if added > 0 and (not self._keeps_execution_possible(added) or not self._make_room(added)):
            self._refuse(f"a segment that takes {own_bytes} bytes itself", added, RETRY_AFTER_S)
        self._count(account, "segments", added)
        attached.own_bytes = own_bytes

    def charge(self, owner: Owner, what: str, size_bytes: int) -> None:
        """Charges bytes of a session itself, until `refund`. Raises BudgetError, which names `what`."""
        owner.account.check_memory(size_bytes)
        if not self._keeps_execution_possible(size_bytes) or not self._make_room(size_bytes):
            self._refuse(what, size_bytes, RETRY_AFTER_S)
        self._count(owner.account, "sessions", size_bytes)

    def refund(self, owner: Owner, size_bytes: int) -> None:
        """Refunds all or part of what `charge` charged."""
        self._count(owner.account, "sessions", -size_bytes)

    # Work

    def start_execution(
        self, segment: Hashable, most_bytes: int | None = None, begins: Callable[[], None] = lambda: None
    ) -> int | None:
        """Charges an execution of a segment, and makes room for it (Rule 3). It takes over the replay that is ready.

        Args:
            segment: The segment's key. Nothing is charged for a segment that was detached while its execution waited.
            most_bytes: Upper bound of the execution's bytes, with a replay that it uses; None for that of `attach`.
            begins: Called when it is certain that the execution begins, before room is made for it. From then on
                `last_needed` must not return the segment.

        Returns:
            Bytes to pass to `end_execution`; None if the execution has to wait until an answer was sent (Rule 2).
        """
        attached = self._segments.get(segment)
        if attached is None:
            return 0
        if not self._bytes["running"]:
            self._bytes["reserve"] = self.measure_reserve(self._charged_bytes())
        need = attached.need_bytes if most_bytes is None else min(most_bytes, attached.need_bytes)
        if need > self.budget_bytes - self._fixed_bytes() - self._bytes["running"]:
            return None
        self.free_ready(segment)
        begins()
        self._make_room(need)
        self._bytes["running"] += need
        return need

    def end_execution(self, need_bytes: int) -> None:
        """Refunds what `start_execution` charged."""
        self._bytes["running"] -= need_bytes

    def keep_ready(self, segment: Hashable, size_bytes: int, drop: Callable[[], None]) -> None:
        """Charges what a speculative replay or backward has left, until it is used, freed or dropped.

        Args:
            segment: The key of the segment.
            size_bytes: Bytes that are held, at most what the execution was charged with.
            drop: Called when the store evicts it.
        """
        self._make_room(size_bytes)
        self._ready[segment] = size_bytes, drop
        self._bytes["ready"] += size_bytes

    def free_ready(self, segment: Hashable) -> None:
        """Refunds what `keep_ready` charged, if it is still charged."""
        size, _ = self._ready.pop(segment, (0, None))
        self._bytes["ready"] -= size

    def drop_ready(self, segment: Hashable) -> None:
        """Evicts what `keep_ready` charged."""
        _, drop = self._ready[segment]
        self.free_ready(segment)
        self._evictions += 1
        drop()

    def room_for_replays(self) -> int:
        """Returns the bytes that replays may take together: the budget without tensors, results and the execution."""
        return self._free_bytes() + self._bytes["ready"] + self._bytes["cached"]

    # Results

    def keep_result(self, key: Hashable, size_bytes: int, drop: Callable[[], None]) -> None:
        """Charges a finished result until `forget_result`, or until the store evicts it and calls `drop`."""
        self._make_room(size_bytes)
        # An answer may still read a result of this key that was forgotten: both are then refunded together.
        forgotten_bytes, _ = self._results.get(key, (0, None))
        self._results[key] = forgotten_bytes + size_bytes, drop
        self._bytes["results"] += size_bytes
        self._pinned_bytes += size_bytes if self._pinned[key] else 0

    def forget_result(self, key: Hashable) -> None:
        """Refunds a result if it is still charged. A pinned result stays charged until it is unpinned."""
        if key not in self._results:
            return
        size, _ = self._results[key]
        if self._pinned[key]:
            self._results[key] = size, None
        else:
            del self._results[key]
            self._bytes["results"] -= size

    def pin_result(self, key: Hashable) -> None:
        """Protects a result from eviction while an answer reads it, until `unpin_result`."""
        self._pinned[key] += 1
        if self._pinned[key] == 1:
            self._pinned_bytes += self._results.get(key, (0, None))[0]

    def unpin_result(self, key: Hashable) -> None:
        """Ends one `pin_result`. The last one refunds a result that was forgotten meanwhile."""
        self._pinned[key] -= 1
        if not self._pinned[key]:
            del self._pinned[key]
            size, drop = self._results.get(key, (0, _do_nothing))
            self._pinned_bytes -= size
            if drop is None:
                self.forget_result(key)

    def start_sending(self, owner: Owner, size_bytes: int) -> None:
        """Charges the messages of an answer that is being sent, until `end_sending`.

        A single answer is accepted whatever else is held, because an accepted segment must have its answer.

        Raises:
            BudgetError: There is no room beside other answers that are being sent.
        """
        if owner.account.inflight_bytes:
            owner.account.check_inflight(size_bytes)
        has_room = self._keeps_execution_possible(size_bytes) and self._make_room(size_bytes)
        if not has_room and self._bytes["sending"]:
            self._refuse(f"an answer of {size_bytes} bytes beside those that are being sent", size_bytes, RETRY_AFTER_S)
        self._count(owner.account, "sending", size_bytes)

    def end_sending(self, owner: Owner, size_bytes: int) -> None:
        """Refunds what `start_sending` charged."""
        self._count(owner.account, "sending", -size_bytes)

    def keep_sums(self, owner: Owner, size_bytes: int) -> bool:
        """Charges gradients that are kept until `drop_sums`. Without room returns False and charges nothing."""
        if not owner.account.may_keep(size_bytes):
            return False
        if not self._keeps_execution_possible(size_bytes) or not self._make_room(size_bytes):
            return False
        self._count(owner.account, "sums", size_bytes)
        return True

    def drop_sums(self, owner: Owner, size_bytes: int) -> None:
        """Refunds all or part of what `keep_sums` charged."""
        self._count(owner.account, "sums", -size_bytes)

    # Room

    def _count(self, account: Account, tier: str, added_bytes: int) -> None:
        """Adds bytes to a tier, and to the account if it can have a quota of them."""
        self._bytes[tier] += added_bytes
        account.held_bytes += added_bytes if tier in _HELD else 0
        account.inflight_bytes += added_bytes if tier in _INFLIGHT else 0

    def _keeps_execution_possible(self, added_bytes: int, need_bytes: int = 0) -> bool:
        """Whether Rule 2 holds with this many more bytes, and with an execution that needs `need_bytes`."""
        execution_bytes = max(self._needs[-1] if self._needs else 0, need_bytes, self._bytes["running"])
        return self._fixed_bytes() + self._bytes["reserve"] + added_bytes + execution_bytes <= self.budget_bytes

    def _fixed_bytes(self) -> int:
        """Returns the charged bytes that cannot be evicted, without those of the execution in progress."""
        count = self._bytes
        shared = count["shared"] + self.free_shared_bytes()  # evicting a shared tensor only makes free shared bytes
        fixed = count["segments"] + count["sessions"] + count["arriving"] + count["sending"] + count["sums"]
        return fixed + shared + self._pinned_bytes

    def _charged_bytes(self) -> int:
        return sum(self._bytes.values()) - self._bytes["reserve"] + self.free_shared_bytes()

    def _free_bytes(self) -> int:
        return self.budget_bytes - self._charged_bytes() - self._bytes["reserve"]

    def _make_room(self, size_bytes: int, *, only_cached: bool = False) -> bool:
        """Whether this many bytes are free, after evictions by Rule 3, or of cached tensors only."""
        # The order is that of Rule 3. A cached tensor is not worth the work that a replay or a result has taken.
        free = self._free_bytes
        if free() >= size_bytes:
            return True
        while free() < size_bytes and self._cached:
            self._evict(next(iter(self._cached)))
        if only_cached:
            return free() >= size_bytes
        while free() < size_bytes and self._ready:
            self.drop_ready(self.last_needed() if self.last_needed is not None else next(iter(self._ready)))
        while free() < size_bytes and self._awaited:
            self._evict(next(iter(self._awaited)))
        for key in [] if free() >= size_bytes else [k for k in self._results if not self._pinned[k]]:
            if free() >= size_bytes:
                break
            _, drop = self._results[key]
            self.forget_result(key)
            self._evictions += 1
            if drop is not None:
                drop()
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


def collision(address: bytes) -> TransferError:
    """Returns the error for a value whose address names another one: Rule 5 of NOTE [Possession]."""
    return TransferError(f"another session has sent something else with the address {address.hex()}")


def _do_nothing() -> None:
    """The `drop` of a result that is not stored. It differs from None, which marks a forgotten result."""
