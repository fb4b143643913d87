"""Gradients of parameters that a worker adds up across backward passes, until the trainer collects the sums.

NOTE [Sums]
1. Gradients that a backward keeps on the worker are pending until the trainer has checked the backward's values and
   commits it. Gradients whose segment is released before that are dropped.
2. Commits are numbered within a round. A repeated commit is ignored. After a gap in the numbers, or a commit of a
   backward that is not pending, no further commits are accepted. So each backward counts once, and the number of
   accepted commits says whether all of them did.
3. Collecting ends a round. Its sums are kept for a trainer that asks again, until a commit of a later round arrives.
4. The order of additions is autograd's: first the contributions of one pass in their order, then their sum to that of
   the passes before. The two are kept apart for parameters that several segments of a pass are known to use. For other
   parameters a pass has only one commit.
5. The event loop's thread does the bookkeeping. The executor's thread does the additions, in the order of the commits,
   and in place only into the result of an earlier addition: contributions may share memory.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from backhaul_runtime.errors import ProgramError, SegmentUnknownError
from backhaul_runtime.process.threads import only_in
from backhaul_runtime.tensors.layout import alignment_of
from backhaul_runtime.wire.tensor_batches import OutgoingTensor
from backhaul_server.worker.accounts import Owner
from backhaul_server.worker.engine.executions import ExecutionResult
from backhaul_server.worker.engine.executor import Executor
from backhaul_server.worker.engine.fair_queue import job_of
from backhaul_server.worker.engine.store import Store
from backhaul_server.worker.engine.stored_values import StoredValue

logger = logging.getLogger("backhaul.worker")

SUM_BYTES = 2 << 10
"""Bytes of each kept tensor beside its elements, with its bookkeeping."""

MOST_SHARED = 1 << 14
"""Upper bound of the parameters known to be used by several segments of a pass. When it is reached, the set is cleared
and filled again."""


@dataclass(frozen=True, slots=True)
class GradientsToKeep:
    """The gradients that a backward may keep on the worker instead of sending them.

    Attributes:
        slots: The trainer's number of each parameter, by the source of the program that it is.
        pass_number: The trainer's number of the backward pass; equal for all segments of one call of backward.
    """

    slots: Mapping[int, int]
    pass_number: int


@dataclass(frozen=True, slots=True)
class _Pending:
    contributions: Mapping[int, Sequence[Tensor]]  # by slot, in the order of the additions
    pass_number: int
    charged_bytes: int


@dataclass(slots=True)
class _Sum:
    total: Tensor
    pass_number: int
    last_pass: Tensor | None = None  # the sum of the last pass, not yet added to the total (Rule 4)
    is_own: bool = False  # whether `total` is the result of an addition that nothing else refers to


class _Round:
    """The sums of one round (Rule 3). The executor's thread alone uses `add`, `totals` and `size_bytes`."""

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
        """Bytes of all tensors in the sums, with `SUM_BYTES` for each."""
        tensors = [tensor for entry in self._sums.values() for tensor in (entry.total, entry.last_pass)]
        return sum(SUM_BYTES + tensor.nbytes for tensor in tensors if tensor is not None)

    @only_in("executor")
    def add(self, pending: _Pending) -> None:
        """Adds the gradients of one commit (Rule 4)."""
        for slot, contributions in pending.contributions.items():
            entry = self._sums.get(slot)
            if entry is None:
                self._sums[slot] = _Sum(_added(None, contributions), pending.pass_number)
            elif entry.pass_number != pending.pass_number:
                _fold(entry)
                entry.pass_number = pending.pass_number
                entry.last_pass = _added(None, contributions)
                if slot not in self._shared:  # no other segment of this pass will add to it
                    _fold(entry)
            else:
                if len(self._shared) >= MOST_SHARED:
                    self._shared.clear()
                self._shared.add(slot)
                if entry.last_pass is None:
                    entry.total, entry.is_own = _added(entry.total, contributions), False
                else:
                    entry.last_pass = _added(entry.last_pass, contributions)

    @only_in("executor")
    def totals(self) -> dict[int, Tensor]:
        """Returns the sum of all passes by slot."""
        for entry in self._sums.values():
            _fold(entry)
            entry.is_own = False
        return {slot: entry.total for slot, entry in self._sums.items()}


def _added(to: Tensor | None, contributions: Sequence[Tensor]) -> Tensor:
    for contribution in contributions:
        if to is not None and (to.shape, to.dtype) != (contribution.shape, contribution.dtype):
            raise ProgramError(  # torch would broadcast them, to a tensor larger than was charged
                f"gradients of one parameter have shapes {list(to.shape)} and {list(contribution.shape)}, and dtypes "
                f"{to.dtype} and {contribution.dtype}"
            )
        to = contribution if to is None else to + contribution
    assert to is not None
    return to


def _fold(entry: _Sum) -> None:
    if entry.last_pass is None:
        return
    if entry.is_own:
        entry.total.add_(entry.last_pass)
    else:
        entry.total, entry.is_own = _added(entry.total, [entry.last_pass]), True
    entry.last_pass = None


class GradientSums:
    """The gradient sums of one session. Event loop only.

    Args:
        session: The session that the gradients belong to.
        store: Charges the session with all gradients, and with the temporary memory of the additions.
        executor: Runs the additions in its thread.
    """

    def __init__(self, session: Owner, store: Store[StoredValue], executor: Executor) -> None:
        self._session = session
        self._store = store
        self._executor = executor
        # The last collection: the number of commits that it covers, and its answer.
        self._collecting: tuple[int, asyncio.Future[dict[int, OutgoingTensor]]] | None = None
        self._pending: dict[int, dict[int, _Pending]] = {}  # by segment, then by request
        self._shared: set[int] = set()
        self._round = _Round(0, self._shared)
        self._is_collected = True

    @property
    def are_awaited(self) -> bool:
        """Whether the trainer has committed gradients that it has not collected."""
        return not self._is_collected

    def keep(
        self, segment: int, backward: int, keep: GradientsToKeep, result: ExecutionResult, sources: Sequence[Tensor]
    ) -> ExecutionResult:
        """Takes contributions out of a result and makes them pending (Rule 1).

        Args:
            segment: The trainer's number for the segment.
            backward: The number of the backward request.
            keep: Which gradients may stay.
            result: The result of the backward, which is not changed.
            sources: The tensors of the segment's sources, in their order.

        Returns:
            The result without the kept contributions; `result` itself if none can stay or there is no room.
        """
        left, contributions = _without(result, keep.slots, sources)
        sizes = [tensor.nbytes for tensors in contributions.values() for tensor in tensors]
        charged = sum(sizes) + max(sizes, default=0) + SUM_BYTES * (1 + len(sizes))
        if not sizes or not self._store.keep_sums(self._session, charged):
            return result
        self._drop(segment, backward)
        self._pending.setdefault(segment, {})[backward] = _Pending(contributions, keep.pass_number, charged)
        return left

    def released(self, segment: int) -> None:
        """Drops the pending gradients of a segment."""
        for backward in list(self._pending.get(segment, ())):
            self._drop(segment, backward)

    def commit(self, number: int, first: int, backwards: Sequence[tuple[int, int]]) -> None:
        """Commits pending gradients, each backward once (Rule 2).

        Args:
            number: The number of the round.
            first: The number within the round of the first commit in `backwards`.
            backwards: Segment and backward request of each commit.
        """
        if number > self._round.number:
            self._end_round()
            self._round, self._collecting = _Round(number, self._shared), None
        if number < self._round.number:
            return
        present, accepted = self._round, []
        for segment, backward in backwards[max(0, present.count + 1 - first) :] if first <= present.count + 1 else ():
            pending = self._pop_pending(segment, backward)
            if pending is None:
                break
            accepted.append(pending)
            present.count += 1
        if accepted:
            self._is_collected = False
            self._submit(present, accepted)

    def collect(self, number: int, count: int) -> "asyncio.Future[dict[int, OutgoingTensor]]":
        """Returns a future of the sums of a round by slot. Repeated calls share it until it is done.

        Args:
            number: The number of the round.
            count: The number of commits that the trainer has made in the round.

        Raises:
            SegmentUnknownError: Not all of these commits were accepted.
        """
        present = self._round
        if (present.number, present.count) != (number, count):
            raise SegmentUnknownError(
                f"{count} backwards of round {number} were committed, of which this worker has "
                f"{present.count if present.number == number else 0}"
            )
        collected, answer = self._collecting or (0, None)
        if answer is None or answer.done() or collected != count:
            answer = asyncio.get_running_loop().create_future()
            self._collecting = count, answer
            self._submit(present, [], answer)
        self._is_collected = True
        return answer

    def close(self) -> None:
        """Drops all gradients, pending and added up."""
        for segment in list(self._pending):
            self.released(segment)
        self._end_round()

    def _pop_pending(self, segment: int, backward: int) -> _Pending | None:
        of_segment = self._pending.get(segment, {})
        pending = of_segment.pop(backward, None)
        if not of_segment:
            self._pending.pop(segment, None)
        return pending

    def _drop(self, segment: int, backward: int) -> None:
        pending = self._pop_pending(segment, backward)
        if pending is not None:
            self._store.drop_sums(self._session, pending.charged_bytes)

    def _end_round(self) -> None:
        self._store.drop_sums(self._session, self._round.charged_bytes)
        self._round.charged_bytes = 0
        self._round.is_dropped = True

    def _submit(
        self, into: _Round, accepted: list[_Pending], answer: "asyncio.Future[dict[int, OutgoingTensor]] | None" = None
    ) -> None:
        charged = sum(pending.charged_bytes for pending in accepted)
        totals: dict[int, OutgoingTensor] = {}
        sizes: list[int] = []

        def work() -> None:
            try:
                for pending in accepted:
                    into.add(pending)
                accepted.clear()
                if answer is not None:
                    totals.update((slot, OutgoingTensor.of(total)) for slot, total in into.totals().items())
            except Exception:  # for example out of memory: the trainer gets an error when it collects
                logger.exception("Adding gradients failed.")
                into.is_whole = False
            sizes.append(into.size_bytes)

        def end() -> None:
            self._store.drop_sums(self._session, charged)
            if not into.is_dropped:
                self._store.drop_sums(self._session, into.charged_bytes - sizes[0])
                into.charged_bytes = sizes[0]
            if answer is not None and not answer.done():
                if into.is_whole:
                    answer.set_result(totals)
                else:
                    answer.set_exception(SegmentUnknownError("this worker could not add gradients up"))
                    answer.exception()  # marks it as retrieved: the caller may have gone, and asyncio would log it

        self._executor.submit(job_of(self._session, lambda: True, work, end, name="a sum of gradients"))


def _without(
    result: ExecutionResult, slots: Mapping[int, int], sources: Sequence[Tensor]
) -> tuple[ExecutionResult, dict[int, list[Tensor]]]:
    """Returns a result without the contributions that can stay on the worker, and those contributions by slot.

    A tensor can stay if it is not a view of larger memory, and if each contribution that uses it belongs to a parameter
    of the same shape and dtype that has a slot. Of a parameter either all contributions stay or none: the trainer could
    not add one to a sum in its place.
    """

    def can_stay(outgoing: OutgoingTensor, source: int) -> bool:
        if source not in slots or source >= len(sources):  # casts are counted after the sources
            return False
        value = sources[source]
        is_like = (outgoing.tensor.shape, outgoing.tensor.dtype) == (value.shape, value.dtype)
        storage_bytes = outgoing.tensor.untyped_storage().nbytes()
        return is_like and storage_bytes <= outgoing.layout.span_bytes + alignment_of(outgoing.layout.device)

    bundle = result.bundle
    sent, leaving, before = set[int](), set[int](), -1
    while before < len(sent) + len(leaving):
        before = len(sent) + len(leaving)
        for view in bundle.views:
            source, index = result.sources[view.position], view.tensor_index
            is_whole = view.layout is None and can_stay(bundle.tensors[index], source)
            if not is_whole or index in sent or source in leaving:
                sent.add(index)
                leaving.add(source)
    contributions: dict[int, list[Tensor]] = {}
    staying = sorted((view.position, view.tensor_index) for view in bundle.views if view.tensor_index not in sent)
    for position, index in staying:
        contributions.setdefault(slots[result.sources[position]], []).append(bundle.tensors[index].tensor)
    return replace(result.only(sent), uncollected=frozenset(position for position, _ in staying)), contributions
