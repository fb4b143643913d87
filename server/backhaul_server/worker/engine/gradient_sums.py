"""Gradients of parameters that stay here across backward passes, until their trainer collects the sums.

NOTE [Sums]
1. What a backward keeps is pending until the trainer, having checked its values, commits it. What goes with its segment
   before that does not count.
2. Commits are numbered within a round. One that came before is passed over; after a gap, or one that is not pending, no
   more are taken. So each counts once, and their number tells whether all did.
3. Collecting ends a round. Its sums stay for a trainer that asks again, until something of a later round comes.
4. They are summed as autograd sums: the contributions of one pass in their order, then that to the passes before. Both
   are kept apart for parameters that several segments of a pass were seen to use; for others a pass is one commit.
5. Bookkeeping is the event loop's. What adds runs in the executor's thread, in the order of commits, and makes new
   tensors: what came may share memory.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from backhaul_runtime.errors import ProgramError, SegmentUnknownError
from backhaul_runtime.tensors.layout import ALIGNMENT_BYTES
from backhaul_runtime.wire.bundle import Bundle
from backhaul_runtime.wire.tensor_stream import OutgoingTensor
from backhaul_server.worker.engine.executor import Executor
from backhaul_server.worker.engine.fair_queue import Job
from backhaul_server.worker.engine.runs import RunResult
from backhaul_server.worker.engine.store import Store
from backhaul_server.worker.engine.stored_values import Held

logger = logging.getLogger("backhaul.worker")

SUM_BYTES = 2 << 10
"""What each tensor that is kept takes beside its elements, and what is noted of it."""

MOST_SHARED = 1 << 14
"""Parameters that are remembered as used by several segments of a pass. Beyond it all are forgotten, and noted anew."""


@dataclass(frozen=True, slots=True)
class GradientsToKeep:
    """What a backward may keep here.

    Attributes:
        slots: The trainer's names for parameters, by source.
        pass_number: The same for backwards that autograd runs as one.
    """

    slots: Mapping[int, int]
    pass_number: int


@dataclass(frozen=True, slots=True)
class _Pending:
    contributions: Mapping[int, Sequence[Tensor]]  # by slot, in order
    pass_number: int
    charged_bytes: int


@dataclass(slots=True)
class _Sum:
    total: Tensor
    pass_number: int
    last_pass: Tensor | None = None  # not in the total yet


class _Round:
    """Sums between two collections."""

    def __init__(self, number: int, shared: set[int]) -> None:
        self.number = number
        self.count = 0
        self.charged_bytes = 0
        self.is_whole = True
        self.is_dropped = False
        self._shared = shared
        self._sums: dict[int, _Sum] = {}

    @property
    def size_bytes(self) -> int:
        """Of all tensors it holds, with what they take beside."""
        held = [tensor for found in self._sums.values() for tensor in (found.total, found.last_pass)]
        return sum(SUM_BYTES + tensor.nbytes for tensor in held if tensor is not None)

    def add(self, pending: _Pending) -> None:
        for slot, contributions in pending.contributions.items():
            found = self._sums.get(slot)
            if found is None:
                self._sums[slot] = _Sum(_added(None, contributions), pending.pass_number)
            elif found.pass_number != pending.pass_number:
                _fold(found)
                found.pass_number = pending.pass_number
                found.last_pass = _added(None, contributions)
                if slot not in self._shared:
                    _fold(found)
            else:
                if len(self._shared) >= MOST_SHARED:
                    self._shared.clear()
                self._shared.add(slot)
                if found.last_pass is None:
                    found.total = _added(found.total, contributions)
                else:
                    found.last_pass = _added(found.last_pass, contributions)

    def totals(self) -> dict[int, Tensor]:
        for found in self._sums.values():
            _fold(found)
        return {slot: found.total for slot, found in self._sums.items()}


def _added(to: Tensor | None, contributions: Sequence[Tensor]) -> Tensor:
    for contribution in contributions:
        if to is not None and (to.shape, to.dtype) != (contribution.shape, contribution.dtype):
            raise ProgramError(  # it would be broadcast, to more than was charged
                f"gradients of one parameter have shapes {list(to.shape)} and {list(contribution.shape)}, and dtypes "
                f"{to.dtype} and {contribution.dtype}"
            )
        to = contribution if to is None else to + contribution
    assert to is not None
    return to


def _fold(found: _Sum) -> None:
    if found.last_pass is not None:
        found.total, found.last_pass = found.total + found.last_pass, None


class GradientSums:
    """Of one session.

    Args:
        session: Its id.
        store: Charged for all that is held, with what adding takes besides.
        executor: Adds.
    """

    def __init__(self, session: str, store: Store[Held], executor: Executor) -> None:
        self._session = session
        self._store = store
        self._executor = executor
        self._collecting: tuple[int, asyncio.Future[dict[int, OutgoingTensor]]] | None = None  # with the commits in it
        self._pending: dict[int, dict[int, _Pending]] = {}  # by segment and request
        self._shared: set[int] = set()
        self._round = _Round(0, self._shared)
        self._is_collected = True

    @property
    def are_awaited(self) -> bool:
        """Whether something was committed that nobody has collected."""
        return not self._is_collected

    def keep(
        self, segment: int, backward: int, keep: GradientsToKeep, found: RunResult, sources: Sequence[Tensor]
    ) -> RunResult:
        """Takes contributions out of a result, pending (Rule 1); without room for them none.

        Args:
            segment: The trainer's number for it.
            backward: Number of the request.
            keep: What may stay.
            found: The result.
            sources: Of the segment.
        """
        left, contributions = _without(found, keep.slots, sources)
        sizes = [tensor.nbytes for tensors in contributions.values() for tensor in tensors]
        charged = sum(sizes) + max(sizes, default=0) + SUM_BYTES * (1 + len(sizes))
        if not sizes or not self._store.keep_sums(charged):
            return found
        self._drop(segment, backward)
        self._pending.setdefault(segment, {})[backward] = _Pending(contributions, keep.pass_number, charged)
        return left

    def released(self, segment: int) -> None:
        """Drops what is pending of a segment."""
        for backward in list(self._pending.get(segment, ())):
            self._drop(segment, backward)

    def commit(self, number: int, first: int, backwards: Sequence[tuple[int, int]]) -> None:
        """Counts what backwards kept, each once (Rule 2).

        Args:
            number: Of the round.
            first: Number of the first of these in it.
            backwards: Segment and request.
        """
        if number > self._round.number:
            self._end_round()
            self._round, self._collecting = _Round(number, self._shared), None
        if number < self._round.number:
            return
        found, taken = self._round, []
        for segment, backward in backwards[max(0, found.count + 1 - first) :] if first <= found.count + 1 else ():
            pending = self._taken(segment, backward)
            if pending is None:
                break
            taken.append(pending)
            found.count += 1
        if taken:
            self._is_collected = False
            self._submit(found, taken)

    def collect(self, number: int, count: int) -> "asyncio.Future[dict[int, OutgoingTensor]]":
        """The sums of a round by slot, once all that was committed is added. Who asks meanwhile shares the answer.

        Raises:
            SegmentUnknownError: Not all of its commits were taken.
        """
        found = self._round
        if (found.number, found.count) != (number, count):
            raise SegmentUnknownError(
                f"{count} backwards of round {number} were committed, of which this worker has "
                f"{found.count if found.number == number else 0}"
            )
        taken, answer = self._collecting or (0, None)
        if answer is None or answer.done() or taken != count:
            answer = asyncio.get_running_loop().create_future()
            self._collecting = count, answer
            self._submit(found, [], answer)
        self._is_collected = True
        return answer

    def close(self) -> None:
        """Lets go of everything."""
        for segment in list(self._pending):
            self.released(segment)
        self._end_round()

    def _taken(self, segment: int, backward: int) -> _Pending | None:
        of_segment = self._pending.get(segment, {})
        pending = of_segment.pop(backward, None)
        if not of_segment:
            self._pending.pop(segment, None)
        return pending

    def _drop(self, segment: int, backward: int) -> None:
        pending = self._taken(segment, backward)
        if pending is not None:
            self._store.drop_sums(pending.charged_bytes)

    def _end_round(self) -> None:
        self._store.drop_sums(self._round.charged_bytes)
        self._round.charged_bytes = 0
        self._round.is_dropped = True

    def _submit(
        self, found: _Round, taken: list[_Pending], answer: "asyncio.Future[dict[int, OutgoingTensor]] | None" = None
    ) -> None:
        charged = sum(pending.charged_bytes for pending in taken)
        totals: dict[int, OutgoingTensor] = {}
        sizes: list[int] = []

        def work() -> None:
            try:
                for pending in taken:
                    found.add(pending)
                taken.clear()
                if answer is not None:
                    totals.update((slot, OutgoingTensor.of(total)) for slot, total in found.totals().items())
            except Exception:  # out of memory, say: the trainer learns it when it collects
                logger.exception("adding gradients failed")
                found.is_whole = False
            sizes.append(found.size_bytes)

        def end() -> None:
            self._store.drop_sums(charged)
            if not found.is_dropped:
                self._store.drop_sums(found.charged_bytes - sizes[0])
                found.charged_bytes = sizes[0]
            if answer is not None and not answer.done():
                if found.is_whole:
                    answer.set_result(totals)
                else:
                    answer.set_exception(SegmentUnknownError("this worker could not add gradients up"))
                    answer.exception()  # seen, also where nobody waits any more

        self._executor.submit(Job(self._session, lambda: True, work, end, 0.0, "a sum of gradients"))


def _without(
    found: RunResult, slots: Mapping[int, int], sources: Sequence[Tensor]
) -> tuple[RunResult, dict[int, list[Tensor]]]:
    """A result without the contributions that can stay, and these by slot, in order.

    A tensor stays if it has memory of its own and is as its parameter in all of its places.
    """

    def can_stay(parcel: OutgoingTensor, source: int) -> bool:
        value = sources[source]
        is_like = (parcel.tensor.shape, parcel.tensor.dtype) == (value.shape, value.dtype)
        held_bytes = parcel.tensor.untyped_storage().nbytes()
        return source in slots and is_like and held_bytes <= parcel.layout.span_bytes + ALIGNMENT_BYTES

    bundle = found.bundle
    sent = {
        view.parcel
        for view in bundle.views
        if view.layout is not None or not can_stay(bundle.parcels[view.parcel], found.sources[view.position])
    }
    contributions: dict[int, list[Tensor]] = {}
    kept = sorted((view.position, view.parcel) for view in bundle.views if view.parcel not in sent)
    for position, parcel in kept:
        contributions.setdefault(slots[found.sources[position]], []).append(bundle.parcels[parcel].tensor)
    index = {parcel: i for i, parcel in enumerate(sorted(sent))}
    left = Bundle(
        tuple(bundle.parcels[parcel] for parcel in index),
        tuple(replace(view, parcel=index[view.parcel]) for view in bundle.views if view.parcel in index),
    )
    digests = tuple(found.tensor_digests[parcel] for parcel in index) if found.tensor_digests else ()
    return replace(found, bundle=left, tensor_digests=digests, kept=frozenset(p for p, _ in kept)), contributions
