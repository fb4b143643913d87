"""Results that come before they are asked for, and how many of them may be held."""

import asyncio
import threading
from collections.abc import Iterator, Sequence

import pytest

from backhaul._worker_client.connection import pushed_results
from backhaul._worker_client.connection.pushed_results import PushedResults
from backhaul_proto.v1 import segment_pb2
from backhaul_runtime.wire.protocol import MOST_PUSHED, PUSHED_BYTES
from backhaul_runtime.wire.splicing import TensorMessage
from backhaul_server.worker.rpc.push_credit import PushCredit

START = segment_pb2.Start(wants_digests=True)


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> Iterator[PushedResults]:
    monkeypatch.setattr(pushed_results, "PATIENCE_S", 10.0)  # nothing here is decided by it, unless it fails
    results = PushedResults()
    yield results
    results.end()


def pushed(
    segment: int, goes_on: Sequence[int] = (), start: segment_pb2.Start = START, size_bytes: int = 100
) -> TensorMessage[segment_pb2.Answer]:
    key, result = segment_pb2.OperationKey(segment=segment), segment_pb2.BackwardResult(goes_on=goes_on)
    return TensorMessage(segment_pb2.Answer(key=key, start=start, backward=result), None, size_bytes)


def take(results: PushedResults, segment: int) -> int | None:
    """The number of the segment whose result was taken; None if there was none."""
    taken = results.take(segment, START)
    return taken.message.key.segment if taken is not None else None


def test_what_was_promised_is_waited_for(results: PushedResults) -> None:
    results.expect([3])
    threading.Timer(0.05, results.arrived, ([pushed(3, [2])],)).start()
    assert take(results, 3) == 3
    threading.Timer(0.05, results.arrived, ([pushed(2)],)).start()
    assert take(results, 2) == 2
    assert take(results, 1) is None


def test_another_start_is_another_result(results: PushedResults) -> None:
    results.arrived([pushed(3, start=segment_pb2.Start())])
    assert take(results, 3) is None


def test_what_came_before_one_that_is_taken_is_let_go(results: PushedResults) -> None:
    results.arrived(map(pushed, (5, 4, 3)))
    assert take(results, 4) == 4
    assert results.taken == 2
    assert take(results, 5) is None
    assert take(results, 3) == 3
    assert results.taken == 3


def test_what_nobody_came_for_gives_way_once_it_fills_the_room(results: PushedResults) -> None:
    results.arrived(pushed(segment, size_bytes=PUSHED_BYTES // 2) for segment in (1, 2))
    assert take(results, 99) is None  # of another chain
    assert take(results, 1) is None
    assert results.taken == 2


def test_a_worker_that_pushes_too_much_makes_itself_lose_it(results: PushedResults) -> None:
    results.arrived(pushed(segment, size_bytes=PUSHED_BYTES) for segment in range(10))
    assert take(results, 9) == 9
    assert take(results, 0) is None
    assert results.taken == 10


def test_the_end_of_the_stream_ends_the_wait(results: PushedResults) -> None:
    results.arrived([pushed(4, [3])])
    threading.Timer(0.05, results.end).start()
    assert take(results, 3) is None
    assert take(results, 4) is None


def test_a_worker_pushes_no_more_than_the_trainer_has_room_for() -> None:
    async def test() -> None:
        credit, results = PushCredit(), PushedResults()

        async def push(segments: Sequence[int], size_bytes: int) -> None:
            for segment in segments:
                await credit.room()
                credit.pushed(size_bytes)
                results.arrived([pushed(segment, size_bytes=size_bytes)])

        pushing = asyncio.ensure_future(push(range(3 * MOST_PUSHED), 1))
        for segment in range(MOST_PUSHED - 1, 3 * MOST_PUSHED, MOST_PUSHED):
            for _ in range(2 * MOST_PUSHED):
                await asyncio.sleep(0)
            assert not credit.has_room
            assert take(results, segment + 1) is None
            assert pushing.done() == (segment + 1 == 3 * MOST_PUSHED)
            credit.taken(results.taken)
        await pushing
        large = asyncio.ensure_future(push(range(5), PUSHED_BYTES // 2))
        await asyncio.sleep(0.01)
        assert take(results, 1) == 1
        assert not large.done()
        credit.taken(results.taken)
        await asyncio.sleep(0.01)
        assert take(results, 3) == 3
        credit.taken(results.taken)
        await large

    asyncio.run(test())
