"""What a worker keeps of gradients: counted once, in autograd's order, within the budget."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

import pytest
import torch
from torch import Tensor

from backhaul import SegmentUnknownError
from backhaul_runtime.wire.bundle import bundle
from backhaul_server.worker.accounts import Account
from backhaul_server.worker.engine.executions import ExecutionResult
from backhaul_server.worker.engine.executor import Executor
from backhaul_server.worker.engine.gradient_sums import SUM_BYTES, GradientsToKeep, GradientSums
from backhaul_server.worker.engine.segment import SessionState
from backhaul_server.worker.engine.store import Store
from backhaul_server.worker.engine.stored_values import StoredValue

SIZE = 64
BYTES = SIZE * 4


SumsTest = Callable[[GradientSums, Store[StoredValue]], Awaitable[None]]


def with_sums(test: SumsTest, *, budget_bytes: int = 1 << 20) -> None:
    async def main() -> None:
        store: Store[StoredValue] = Store(budget_bytes)
        session = SessionState("session", Account(), "trainer", 0.0)
        executor = Executor(lambda: None, lambda _: None, 60.0)
        sums = GradientSums(session, store, executor)
        try:
            await test(sums, store)
        finally:
            sums.close()
            await executor.close()
            assert store.usage().results == 0

    asyncio.run(main())


def values(count: int) -> list[Tensor]:
    """Of very different size: the order of their sum shows."""
    return [torch.randn(SIZE) * 10 ** float(torch.randint(-4, 4, ())) for _ in range(count)]


def finished(*contributions: Tensor) -> ExecutionResult:
    """One source, used so often."""
    return ExecutionResult(bundle(list(enumerate(contributions))), (), (0,) * len(contributions))


def keep(sums: GradientSums, segment: int, contributions: Sequence[Tensor], pass_number: int = 0) -> ExecutionResult:
    return sums.keep(segment, 1, GradientsToKeep({0: 7}, pass_number), finished(*contributions), [torch.zeros(SIZE)])


async def collected(sums: GradientSums, number: int, count: int) -> Mapping[int, Tensor]:
    return {slot: outgoing.tensor for slot, outgoing in (await sums.collect(number, count)).items()}


def test_passes_are_summed_one_after_the_other() -> None:
    async def test(sums: GradientSums, store: Store[StoredValue]) -> None:
        contributions = values(5)
        for number, value in enumerate(contributions, start=1):
            left = keep(sums, number, [value], pass_number=number)
            assert (left.bundle.tensors, left.uncollected) == ((), {0})
            sums.commit(1, number, [(number, 1)])
        assert sums.are_awaited
        a, b, c, d, e = contributions
        assert torch.equal((await collected(sums, 1, 5))[7], (((a + b) + c) + d) + e)
        assert store.usage().results == BYTES + SUM_BYTES

    with_sums(test)


def test_segments_of_a_pass_are_summed_first() -> None:
    async def test(sums: GradientSums, store: Store[StoredValue]) -> None:
        a, b, c, d, e, f = values(6)
        for number, (pass_number, contributions) in enumerate([(1, [a, b]), (1, [c]), (2, [d]), (2, [e, f])], start=1):
            keep(sums, number, contributions, pass_number)
            sums.commit(1, number, [(number, 1)])
        assert torch.equal((await collected(sums, 1, 4))[7], ((a + b) + c) + ((d + e) + f))

    with_sums(test)


def test_commits_count_once_and_without_gaps() -> None:
    async def test(sums: GradientSums, store: Store[StoredValue]) -> None:
        a, b, c = values(3)
        for number, value in enumerate([a, b, c], start=1):
            keep(sums, number, [value], pass_number=number)
        sums.commit(1, 1, [(1, 1), (2, 1)])
        sums.commit(1, 1, [(1, 1), (2, 1)])
        sums.commit(1, 4, [(3, 1)])
        assert torch.equal((await collected(sums, 1, 2))[7], a + b)
        with pytest.raises(SegmentUnknownError, match="3 backwards"):
            sums.collect(1, 3)
        sums.commit(1, 2, [(2, 1), (3, 1)])
        assert torch.equal((await collected(sums, 1, 3))[7], (a + b) + c)

    with_sums(test)


def test_what_was_released_does_not_count() -> None:
    async def test(sums: GradientSums, store: Store[StoredValue]) -> None:
        keep(sums, 1, values(1))
        sums.released(1)
        assert store.usage().results == 0
        sums.commit(1, 1, [(1, 1)])
        assert not sums.are_awaited
        with pytest.raises(SegmentUnknownError):
            sums.collect(1, 1)

    with_sums(test)


def test_gradients_of_other_shapes_are_not_broadcast() -> None:
    async def test(sums: GradientSums, store: Store[StoredValue]) -> None:
        for number, shape in enumerate([(SIZE, 1), (1, SIZE)], 1):
            gradient = torch.ones(shape)
            sums.keep(number, 1, GradientsToKeep({0: 7}, 0), finished(gradient), [gradient])
        sums.commit(1, 1, [(1, 1), (2, 1)])
        with pytest.raises(SegmentUnknownError):
            await collected(sums, 1, 2)
        assert store.usage().results < 5 * SUM_BYTES + 3 * 4 * SIZE

    with_sums(test)


def test_a_round_drops_the_one_before() -> None:
    async def test(sums: GradientSums, store: Store[StoredValue]) -> None:
        a, b, c = values(3)
        for number, value in enumerate([a, b, c], start=1):
            keep(sums, number, [value], pass_number=number)
        sums.commit(1, 1, [(1, 1)])
        sums.commit(2, 1, [(2, 1)])
        sums.commit(1, 2, [(3, 1)])
        assert torch.equal((await collected(sums, 2, 1))[7], b)
        with pytest.raises(SegmentUnknownError):
            sums.collect(1, 1)

    with_sums(test)


def test_without_room_gradients_are_returned() -> None:
    async def test(sums: GradientSums, store: Store[StoredValue]) -> None:
        keep(sums, 1, values(1))
        left = keep(sums, 2, values(1))
        assert (len(left.bundle.tensors), left.uncollected) == (1, set())
        assert store.usage().results <= store.budget_bytes

    with_sums(test, budget_bytes=3 * BYTES)


def test_what_has_no_memory_of_its_own_is_returned() -> None:
    async def test(sums: GradientSums, store: Store[StoredValue]) -> None:
        whole = torch.randn(2 * SIZE)
        other = torch.randn(SIZE)
        mixed = [whole[SIZE:], other]  # the trainer could not add the first to a sum of which the second is a part
        for contributions in ([whole[:SIZE], whole[SIZE:]], [whole[:SIZE]], [other.double()], [other[:1]], mixed):
            left = keep(sums, 1, contributions)
            assert len(left.bundle.views) == len(contributions)
            assert left.uncollected == set()

    with_sums(test)
