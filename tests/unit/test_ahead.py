"""Results that come before they are asked for, from a worker that the test plays."""

import queue
import threading
from collections.abc import Callable, Iterator, Sequence

import grpc
import pytest

from backhaul._worker_client.connection import pushed_results
from backhaul._worker_client.connection.pushed_results import PushedResults
from backhaul_proto.v1 import segment_pb2
from backhaul_runtime.wire.splicing import TensorMessage
from conftest import wait_until

START = segment_pb2.Start(wants_digests=True)


class CancelledError(grpc.RpcError):
    pass


class Played:
    """A method of a stub, and the streams it opened, the last of which sends what the test says."""

    def __init__(self) -> None:
        self.sessions: list[str] = []
        self.calls: list[PlayedCall] = []

    def __call__(self, request: segment_pb2.AheadRequest) -> "PlayedCall":
        self.sessions.append(request.session)
        self.calls.append(PlayedCall())
        return self.calls[-1]

    def send(
        self,
        segment: int,
        goes_on: Sequence[int] = (),
        start: segment_pb2.Start = START,
        size_bytes: int = 100,
        more: Sequence[segment_pb2.AheadResponse] = (),
    ) -> None:
        result = segment_pb2.BackwardResult(goes_on=goes_on)
        message = segment_pb2.AheadResponse(segment=segment, start=start, result=result, more=more)
        self.calls[-1].messages.put(TensorMessage(message, None, size_bytes))


class PlayedCall:
    def __init__(self) -> None:
        self.messages: queue.SimpleQueue[TensorMessage[segment_pb2.AheadResponse] | None] = queue.SimpleQueue()
        self.read = 0

    def __iter__(self) -> Iterator[TensorMessage[segment_pb2.AheadResponse]]:
        while (message := self.messages.get()) is not None:
            self.read += 1
            yield message
        raise CancelledError

    def cancel(self) -> None:
        self.messages.put(None)


@pytest.fixture
def played() -> Played:
    return Played()


@pytest.fixture
def take(played: Played, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], int | None]]:
    """Takes a segment's result from an open stream: its number, or None."""
    monkeypatch.setattr(pushed_results, "PATIENCE_S", 10.0)  # nothing here is decided by it, unless it fails
    before = threading.active_count()
    ahead = PushedResults(played)
    assert ahead.take("a", 0, START) is None

    def take(segment: int) -> int | None:
        taken = ahead.take("a", segment, START)
        return taken.message.segment if taken is not None else None

    take.ahead = ahead  # type: ignore[attr-defined]
    yield take
    ahead.close()
    wait_until(lambda: threading.active_count() <= before, "its thread ends")


def came(played: Played, count: int) -> None:
    wait_until(lambda: played.calls[-1].read >= count, "the results came")


def test_what_was_promised_is_waited_for(take: Callable[[int], int | None], played: Played) -> None:
    take.ahead.expect([3])  # type: ignore[attr-defined]
    threading.Timer(0.05, played.send, (3, [2])).start()
    assert take(3) == 3
    threading.Timer(0.05, played.send, (2,)).start()
    assert take(2) == 2
    assert take(1) is None


def test_another_start_is_another_result(take: Callable[[int], int | None], played: Played) -> None:
    played.send(3, start=segment_pb2.Start())
    came(played, 1)
    assert take(3) is None


def test_what_came_before_one_that_is_taken_is_let_go(take: Callable[[int], int | None], played: Played) -> None:
    for segment in (5, 4, 3):
        played.send(segment)
    came(played, 3)
    assert take(4) == 4
    assert take(5) is None
    assert take(3) == 3


def test_several_in_one_message(take: Callable[[int], int | None], played: Played) -> None:
    more = [
        segment_pb2.AheadResponse(segment=4, start=START, result=segment_pb2.BackwardResult(goes_on=[3])),
        segment_pb2.AheadResponse(segment=3, start=START, result=segment_pb2.BackwardResult(goes_on=[2])),
    ]
    played.send(5, [4], more=more)
    came(played, 1)
    assert [take(5), take(4), take(3)] == [5, 4, 3]
    threading.Timer(0.05, played.send, (2,)).start()
    assert take(2) == 2


def test_nothing_more_is_read_than_there_is_room_for(take: Callable[[int], int | None], played: Played) -> None:
    for segment in range(6):
        played.send(segment, size_bytes=pushed_results.HELD_BYTES // 2)
    came(played, 3)  # two are held, and one waits for room
    assert take(0) == 0
    came(played, 4)
    assert played.calls[-1].read == 4
    assert take(99) is None  # of another chain: what nobody has come for gives way
    came(played, 6)
    assert take(1) is None  # it gave way, and now the next two do
    take.ahead.expect([5])  # type: ignore[attr-defined]
    assert take(5) == 5


def test_one_that_broke_gives_nothing_and_the_next_opens_another(
    take: Callable[[int], int | None], played: Played
) -> None:
    take.ahead.expect([3])  # type: ignore[attr-defined]
    played.calls[-1].cancel()
    assert take(3) is None
    wait_until(lambda: take(3) is None and len(played.calls) == 2, "another is open")
    played.send(3)
    came(played, 1)
    assert take(3) == 3


def test_each_session_has_its_own(take: Callable[[int], int | None], played: Played) -> None:
    played.send(3)
    came(played, 1)
    assert take.ahead.take("b", 3, START) is None  # type: ignore[attr-defined]
    assert played.sessions == ["a", "b"]
