"""The dashboard's HTTP server: who stops reading is cut off, and nobody else."""

import asyncio
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from backhaul_server.dashboard.http import serving
from backhaul_server.dashboard.http.serving import STUCK_S, Server

PART = b"x" * (1 << 16)


class NoFeed:
    async def close(self) -> None:
        pass


def server_of(application: Any) -> Server:
    server = Server(application, NoFeed())  # type: ignore[arg-type]
    server.config.lifespan = "off"
    return server


class Transport:
    """Of a connection, with what waits for its client."""

    def __init__(self, waiting_bytes: int) -> None:
        self.waiting_bytes = waiting_bytes
        self.is_cut = False

    def get_write_buffer_size(self) -> int:
        return self.waiting_bytes

    def abort(self) -> None:
        self.is_cut = True


def test_who_takes_nothing_for_long_is_cut_off() -> None:
    server, idle, stuck, slow, fed = server_of(None), *map(Transport, (0, 500, 500, 500))
    connections = [SimpleNamespace(transport=transport) for transport in (idle, stuck, slow, fed, None)]
    server.server_state.connections = connections  # type: ignore[assignment]
    for second in range(int(STUCK_S) + 1):
        server._cut_stuck(float(second))
        slow.waiting_bytes -= 10
        fed.waiting_bytes += 10
        assert stuck.is_cut == fed.is_cut == (second == STUCK_S)
    assert not idle.is_cut
    assert not slow.is_cut


@pytest.mark.slow
def test_the_connection_of_a_client_that_stops_reading_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "STUCK_S", 0.0)

    async def run() -> None:
        ended = asyncio.Event()

        async def endless(scope: Any, receive: Any, send: Any) -> None:
            await receive()
            gone = asyncio.create_task(receive())
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while not gone.done():
                await send({"type": "http.response.body", "body": PART, "more_body": True})
                await asyncio.sleep(0)
            ended.set()

        server = server_of(endless)
        with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as client:
            serves = asyncio.create_task(server.serve(sockets=[listener]))
            client.connect(listener.getsockname())
            client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await asyncio.wait_for(ended.wait(), 30)
            server.should_exit = True
            await serves

    asyncio.run(run())
