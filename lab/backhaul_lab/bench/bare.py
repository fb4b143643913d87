"""Baselines for transfers: a gRPC server and a TCP server that only pass bytes. Imports no torch.

`python -m backhaul_lab.bench.bare` runs both servers in one process and prints their ports. Like the worker, it uses
asyncio and an allocator that keeps freed memory, which environment variables configure.
"""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from time import perf_counter
from typing import Any

import grpc

CHUNK_BYTES = 1 << 20
TENSOR_BYTES = 64 << 20
SERVICE = "backhaul_lab.Bare"
OPTIONS = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1), ("grpc.so_reuseport", 0))
_UP, _DOWN = b"u", b"d"


class BareGrpc:
    """A client of the gRPC server that streams raw bytes."""

    def __init__(self, port: int) -> None:
        self._channel = grpc.insecure_channel(f"127.0.0.1:{port}", options=OPTIONS)
        self._put: Any = self._channel.stream_unary(f"/{SERVICE}/Put")
        self._get: Any = self._channel.unary_stream(f"/{SERVICE}/Get")
        self._echo: Any = self._channel.stream_stream(f"/{SERVICE}/Echo")
        self._chunks = [bytes(CHUNK_BYTES)] * (TENSOR_BYTES // CHUNK_BYTES)

    def put(self) -> float:
        """Sends TENSOR_BYTES and waits for the acknowledgement. Returns the duration in seconds."""
        began_s = perf_counter()
        self._put(iter(self._chunks))
        return perf_counter() - began_s

    def get(self) -> float:
        """Requests TENSOR_BYTES and receives them. Returns the duration in seconds."""
        began_s = perf_counter()
        received = sum(map(len, self._get(b"")))
        assert received == TENSOR_BYTES
        return perf_counter() - began_s

    def round_trips(self, count: int, size_bytes: int) -> float:
        """Makes `count` round trips on an open stream. Returns the mean duration of one, in seconds."""
        message = bytes(size_bytes)
        answered = threading.Semaphore(1)

        def messages() -> Iterator[bytes]:
            for _ in range(count + 1):
                answered.acquire()
                yield message

        answers = self._echo(messages())
        next(answers)  # The first round trip opens the stream and is not timed.
        began_s = perf_counter()
        answered.release()
        for _ in range(count):
            next(answers)
            answered.release()
        taken_s = perf_counter() - began_s
        answers.cancel()
        return taken_s / count

    def close(self) -> None:
        """Closes the connection."""
        self._channel.close()


class BareTcp:
    """A client of the TCP server with one socket and one buffer.

    Attributes:
        congestion_control: Name of the socket's TCP congestion control.
    """

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._buffer = bytearray(TENSOR_BYTES)
        name = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        self.congestion_control = name.rstrip(b"\0").decode()

    def put(self) -> float:
        """Sends TENSOR_BYTES and waits for the acknowledgement. Returns the duration in seconds."""
        began_s = perf_counter()
        self._socket.sendall(_UP)
        self._socket.sendall(self._buffer)
        self._socket.recv(1)
        return perf_counter() - began_s

    def get(self) -> float:
        """Requests TENSOR_BYTES and receives them. Returns the duration in seconds."""
        began_s = perf_counter()
        self._socket.sendall(_DOWN)
        receive_into(self._socket, self._buffer)
        return perf_counter() - began_s

    def close(self) -> None:
        """Closes the connection."""
        self._socket.close()


def receive_into(peer: socket.socket, buffer: bytearray) -> bool:
    """Fills a buffer from a socket. Returns False if the peer closed the connection."""
    view = memoryview(buffer)
    while view:
        received = peer.recv_into(view)
        if not received:
            return False
        view = view[received:]
    return True


async def _put(chunks: AsyncIterator[bytes], context: Any) -> bytes:
    async for _ in chunks:
        pass
    return b""


async def _get(request: bytes, context: Any) -> AsyncIterator[bytes]:
    chunk = bytes(CHUNK_BYTES)
    for _ in range(TENSOR_BYTES // CHUNK_BYTES):
        yield chunk


async def _echo(messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
    async for message in messages:
        yield message


def _serve_tcp(listener: socket.socket) -> None:
    peer, _ = listener.accept()
    buffer = bytearray(TENSOR_BYTES)
    while command := peer.recv(1):
        if command == _DOWN:
            peer.sendall(buffer)
        elif receive_into(peer, buffer):
            peer.sendall(_UP)


async def _serve() -> None:
    server = grpc.aio.server(options=OPTIONS)
    handlers: dict[str, Any] = {
        "Put": grpc.stream_unary_rpc_method_handler(_put),
        "Get": grpc.unary_stream_rpc_method_handler(_get),
        "Echo": grpc.stream_stream_rpc_method_handler(_echo),
    }
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, handlers)])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_serve_tcp, args=(listener,), daemon=True).start()
    print(port, listener.getsockname()[1], flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(_serve())
