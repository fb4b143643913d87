"""Requests on a stream that stays open, to a worker that the test plays."""

import queue
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from backhaul._worker_client.connection.request_stream import RequestStream
from backhaul_runtime.errors import WorkerLostError
from conftest import wait_until


class CancelledError(grpc.RpcError):
    pass


class Played:
    """A method of a stub, and the streams it opened. Answers are echoes, until the test takes them for itself."""

    def __init__(self) -> None:
        self.opened = 0
        self.asked: queue.Queue[bytes] = queue.Queue()
        self.is_silent = threading.Event()

    def __call__(self, requests: Iterator[bytes]) -> "PlayedCall":
        self.opened += 1
        return PlayedCall(self, requests)


class PlayedCall:
    def __init__(self, played: Played, requests: Iterator[bytes]) -> None:
        self.played, self.requests, self.cancelled = played, requests, threading.Event()

    def __next__(self) -> Any:
        request = next(self.requests)
        self.played.asked.put(request)
        if self.played.is_silent.is_set():
            self.cancelled.wait()
        if self.cancelled.is_set() or request == b"broken":
            raise CancelledError
        return request

    def cancel(self) -> None:
        self.cancelled.set()


@pytest.fixture
def played() -> Played:
    return Played()


@pytest.fixture
def short(played: Played) -> Iterator[RequestStream]:
    before = threading.active_count()
    stream = RequestStream(played, silence_s=0.2)
    yield stream
    stream.close()
    wait_until(lambda: threading.active_count() <= before, "its thread ends")


def test_requests_share_a_stream(short: RequestStream, played: Played) -> None:
    assert [short.try_call(request) for request in (b"1", b"2", b"3")] == [b"1", b"2", b"3"]
    assert played.opened == 1


def test_one_that_broke_gives_nothing_and_the_next_opens_another(short: RequestStream, played: Played) -> None:
    assert short.try_call(b"broken") is None
    assert short.try_call(b"1") == b"1"
    assert played.opened == 2


@pytest.mark.slow
def test_silence_is_an_error(short: RequestStream, played: Played) -> None:
    played.is_silent.set()
    with pytest.raises(WorkerLostError) as caught:
        short.try_call(b"1")
    assert caught.value.status == "SILENT"


def test_who_finds_it_taken_does_not_wait(played: Played) -> None:
    short = RequestStream(played, silence_s=60.0)
    played.is_silent.set()
    first = threading.Thread(target=short.try_call, args=(b"1",))
    first.start()
    played.asked.get(timeout=60)
    assert short.try_call(b"2") is None
    short.close()
    first.join(60)
    assert not first.is_alive()
