"""What a trainer tells of its links while a worker is lost, comes back and drains."""

from types import SimpleNamespace
from typing import cast

import pytest

from backhaul._observe.run_events import RunEvents
from backhaul._worker_client.connection import connection
from backhaul._worker_client.connection.connection import Connection
from backhaul._worker_client.connection.stubs import Stubs
from backhaul._worker_client.connection.worker_session import WorkerSession
from backhaul_proto.v1 import session_pb2
from backhaul_runtime.process.addresses import parse_address
from conftest import wait_until
from support.processes import WorkerProcess


@pytest.mark.slow
def test_a_link_is_told_while_its_worker_is_lost_and_comes_back() -> None:
    events = RunEvents()
    with WorkerProcess() as worker:
        address = parse_address(worker.address)
        opened = Connection(lambda: address, 2.0, events=events, takes_socket=False)
        opened.open(60)
        try:
            link = opened.link()
            assert (link.worker, link.connected) == (worker.address, True)
            assert 0 < link.round_trip_s / 2 <= link.clock_error_s
            assert abs(link.clock_offset_s) <= link.clock_error_s  # both processes have the same clock
            opened.traffic.add(up_bytes=5, down_bytes=7)
            worker.kill()
            wait_until(lambda: not opened.link().connected, "the loss is noticed")
            (lost,) = events.take()
            assert (lost.kind, lost.worker) == ("worker_lost", worker.address)
            assert lost.text.startswith(f"Worker {worker.address} was lost: ")
            with WorkerProcess(listen=worker.address):
                wait_until(lambda: opened.link().connected, "it is back")
                wait_until(lambda: "worker_back" in {event.kind for event in events.take()}, "that is told")
                link = opened.link()
                assert (link.up_bytes, link.down_bytes) == (5, 7)
        finally:
            opened.close()


def test_a_worker_that_drains_is_told_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    events = RunEvents()
    opened = Connection(lambda: parse_address("a:1"), 2.0, events=events)
    opened.name, opened._stubs = "a:1", cast(Stubs, SimpleNamespace(sessions=SimpleNamespace(KeepSession=None)))
    answer = session_pb2.KeepSessionResponse(draining=True, clock_s=1.0)
    monkeypatch.setattr(connection, "call_unary", lambda *arguments, **options: answer)
    for _ in range(2):
        opened._ask(WorkerSession(1, "session", 1, {}, 30.0))
    (event,) = events.take()
    assert (event.kind, event.worker, event.count) == ("worker_draining", "a:1", 1)
