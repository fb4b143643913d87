"""The stream of requests and answers, to a worker that the test plays."""

import queue
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from backhaul._worker_client.connection.exchange import Exchange, PendingAnswer
from backhaul_proto.v1 import segment_pb2
from backhaul_runtime.errors import (
    BackhaulError,
    BudgetError,
    LimitError,
    TransferError,
    WorkerLostError,
)
from backhaul_runtime.wire.splicing import TensorMessage, deserializer
from conftest import QUIET_S, wait_until

Answer = segment_pb2.Answer


class CancelledError(grpc.RpcError):
    pass


class Played:
    """A method of a stub, and the calls of it, whose answers the test sends."""

    def __init__(self) -> None:
        self.calls: list[PlayedCall] = []

    def __call__(self, requests: Iterator[bytes]) -> "PlayedCall":
        self.calls.append(PlayedCall(requests))
        return self.calls[-1]

    @property
    def last(self) -> "PlayedCall":
        return self.calls[-1]


class PlayedCall:
    """Reads requests in a thread of its own, as gRPC does."""

    def __init__(self, requests: Iterator[bytes]) -> None:
        self.asked: queue.Queue[segment_pb2.Request] = queue.Queue()
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._take, args=(requests,), daemon=True).start()

    def _take(self, requests: Iterator[bytes]) -> None:
        for request in requests:
            self.asked.put(deserializer(segment_pb2.Request)(request).message)

    def __iter__(self) -> Iterator[Any]:
        while not isinstance(answer := self._answers.get(), grpc.RpcError):
            yield answer
        raise answer

    def send(self, *answers: Answer | TransferError) -> None:
        for answer in answers:
            self._answers.put(answer if isinstance(answer, TransferError) else TensorMessage(answer, None, 10))

    def cancel(self) -> None:
        self._answers.put(CancelledError())


@pytest.fixture
def played() -> Played:
    return Played()


@pytest.fixture
def exchange(played: Played) -> Iterator[Exchange]:
    before = threading.active_count()
    exchange = Exchange(played, QUIET_S)
    yield exchange
    exchange.close()
    wait_until(lambda: threading.active_count() <= before, "its threads end")


def key(segment: int) -> segment_pb2.OperationKey:
    return segment_pb2.OperationKey(segment=segment)


def save(segment: int) -> segment_pb2.Request:
    return segment_pb2.Request(session="s", save=segment_pb2.SaveRequest(key=key(segment)))


def saved(number: int, segment: int) -> Answer:
    return Answer(number=number, key=key(segment), save=segment_pb2.SaveResult(missing_tensors=[b"%d" % segment]))


RELEASE = segment_pb2.Request(session="s", release=segment_pb2.ReleaseRequest(number=1))
RELEASED = segment_pb2.ReleaseResult()


def segment_of(pending: PendingAnswer) -> int:
    return int(pending.next().message.save.missing_tensors[0])


def in_flight(exchange: Exchange, played: Played, *segments: int) -> list[PendingAnswer]:
    """Saves that the worker has read."""
    pending = [exchange.ask(save(segment)) for segment in segments]
    assert [played.last.asked.get(timeout=60).save.key.segment for _ in segments] == list(segments)
    return pending


def failure(pending: PendingAnswer) -> BackhaulError:
    with pytest.raises(BackhaulError) as caught:
        pending.next()
    return caught.value


def test_answers_reach_their_requests_in_any_order(exchange: Exchange, played: Played) -> None:
    first, second, third = in_flight(exchange, played, 11, 12, 13)
    played.last.send(saved(3, 13), saved(1, 11), saved(2, 12))
    assert [segment_of(pending) for pending in (second, first, third)] == [12, 11, 13]
    assert len(played.calls) == 1


def test_threads_share_the_stream(exchange: Exchange, played: Played) -> None:
    def ask(segment: int) -> int:
        with exchange.ask(save(segment)) as pending:
            return segment_of(pending)

    with ThreadPoolExecutor(8) as threads:
        asked = [threads.submit(ask, segment) for segment in range(100)]
        wait_until(lambda: bool(played.calls), "the stream is open")
        for number in range(1, 101):
            played.last.send(saved(number, played.last.asked.get(timeout=60).save.key.segment))
        assert [future.result(60) for future in asked] == list(range(100))
    assert len(played.calls) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        saved(1, 12),
        Answer(number=1, key=segment_pb2.OperationKey(segment=11, backward=1), save=segment_pb2.SaveResult()),
        Answer(number=1, key=key(11), release=RELEASED),
        Answer(number=1, key=key(11)),
        saved(3, 13),
        saved(0, 11),
    ],
    ids=[
        "of another segment",
        "of another backward",
        "of another kind",
        "says nothing",
        "to no request",
        "without a number",
    ],
)
def test_an_answer_to_another_request_reaches_nobody(exchange: Exchange, played: Played, wrong: Answer) -> None:
    pending = in_flight(exchange, played, 11, 12)
    played.last.send(wrong, saved(2, 12))
    assert [type(failure(request)) for request in pending] == [TransferError, TransferError]
    (again,) = in_flight(exchange, played, 11)
    played.last.send(saved(1, 11))
    assert segment_of(again) == 11
    assert len(played.calls) == 2


def test_a_damaged_answer_may_be_anyones(exchange: Exchange, played: Played) -> None:
    pending = in_flight(exchange, played, 11, 12)
    played.last.send(TransferError("damaged"))
    errors = [failure(request) for request in pending]
    assert [(type(error), getattr(error, "status", "")) for error in errors] == [(WorkerLostError, "DAMAGED")] * 2
    assert errors[0] is not errors[1]  # two threads raise them


def test_a_stream_that_breaks_fails_what_is_in_flight(exchange: Exchange, played: Played) -> None:
    (pending,) = in_flight(exchange, played, 11)
    played.last.cancel()
    assert isinstance(failure(pending), WorkerLostError)
    in_flight(exchange, played, 12)
    assert len(played.calls) == 2


def test_an_error_is_one_requests(exchange: Exchange, played: Played) -> None:
    first, second = in_flight(exchange, played, 11, 12)
    played.last.send(Answer(number=1, error=BudgetError("full", needed_bytes=3).to_bytes()), saved(2, 12))
    error = failure(first)
    assert isinstance(error, BudgetError)
    assert error.needed_bytes == 3
    assert segment_of(second) == 12


def test_an_answer_that_nobody_waits_for_any_more_is_dropped(exchange: Exchange, played: Played) -> None:
    given_up, waiting = in_flight(exchange, played, 11, 12)
    with given_up:
        pass
    played.last.send(saved(1, 11), saved(2, 12))
    assert segment_of(waiting) == 12
    (later,) = in_flight(exchange, played, 11)
    played.last.send(saved(1, 11), saved(3, 11))
    assert segment_of(later) == 11
    assert len(played.calls) == 1


def test_an_interrupt_leaves_nobody_anothers_answer(exchange: Exchange, played: Played) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), exchange.ask(save(11)) as pending:
        pending.next(interrupt)
    later = exchange.ask(save(12))
    assert [played.last.asked.get(timeout=60).save.key.segment for _ in range(2)] == [11, 12]
    played.last.send(saved(1, 11), saved(2, 12))
    assert segment_of(later) == 12


@pytest.mark.slow
def test_silence_ends_the_stream(played: Played) -> None:
    exchange = Exchange(played, silence_s=0.2)
    waiting = exchange.ask(save(11))
    other = exchange.ask(save(12))
    assert isinstance(error := failure(waiting), WorkerLostError)
    assert error.status == "SILENT"
    assert isinstance(error := failure(other), WorkerLostError)
    assert error.status == "SILENT"
    exchange.close()


def test_a_message_that_is_too_large_fails_alone(exchange: Exchange, played: Played) -> None:
    (pending,) = in_flight(exchange, played, 11)
    large = save(12)
    large.save.generator_states.extend([bytes(1 << 20)] * 5)
    with pytest.raises(LimitError, match="a message is larger than the worker accepts"):
        exchange.ask(large)
    played.last.send(saved(1, 11))
    assert segment_of(pending) == 11


def test_a_damaged_call_is_repeated_once(exchange: Exchange, played: Played) -> None:
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(exchange.call, RELEASE)
        wait_until(lambda: bool(played.calls), "the stream is open")
        for number in (1, 2):
            assert played.last.asked.get(timeout=60).release.number == 1
            damaged = Answer(number=number, error=TransferError("damaged").to_bytes())
            played.last.send(damaged if number == 1 else Answer(number=number, release=RELEASED))
        assert asked.result(60).HasField("release")


def test_what_is_in_flight_at_the_end_fails(exchange: Exchange, played: Played) -> None:
    (pending,) = in_flight(exchange, played, 11)
    exchange.close()
    assert isinstance(failure(pending), WorkerLostError)
