"""The paths and file descriptors that a worker reserves."""

import resource
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from backhaul_server.worker.listening import ListenError, SocketPath, connections_of_a_peer, server_options
from backhaul_server.worker.rpc.peers import Peers


@pytest.mark.parametrize("exists", [True, False])
def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path, exists: bool) -> None:
    target, lock = tmp_path / "somebody's", tmp_path / "worker.sock.lock"
    if exists:
        target.write_text("untouched")
    lock.symlink_to(target)
    with pytest.raises(ListenError, match="worker.sock"):
        SocketPath(tmp_path / "worker.sock")
    assert target.exists() == exists
    assert not exists or target.read_text() == "untouched"
    assert lock.is_symlink()


def test_a_lock_that_is_no_file_is_not_opened(tmp_path: Path) -> None:
    (tmp_path / "worker.sock.lock").mkdir()
    with pytest.raises(ListenError, match="worker.sock"):
        SocketPath(tmp_path / "worker.sock")


def test_the_limit_of_open_files_is_raised_as_far_as_it_may_be() -> None:
    code = (
        "import resource\n"
        "from backhaul_server.worker.listening import raise_file_limit\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 512))\n"
        "print(raise_file_limit(), *resource.getrlimit(resource.RLIMIT_NOFILE))\n"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True)
    assert process.stdout == "512 512 512\n"
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] != 512


def test_connections_leave_file_descriptors_for_other_uses() -> None:
    options = dict(server_options(1_024))
    assert options["grpc.max_allowed_incoming_connections"] == 512
    assert options["grpc.server_handshake_timeout_ms"] == 5_000
    assert dict(server_options(1 << 20))["grpc.max_allowed_incoming_connections"] == 8_192
    assert connections_of_a_peer(1_024) == 128


def test_the_newest_connections_of_an_address_that_has_too_many_are_closed() -> None:
    with ExitStack() as held, socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        peers = Peers(server.getsockname()[1], most=5)

        def connect(host: str, count: int) -> list[socket.socket]:
            made = [
                held.enter_context(socket.create_connection(server.getsockname(), 10, (host, 0))) for _ in range(count)
            ]
            for _ in made:
                held.enter_context(server.accept()[0])
            return made

        first, other = connect("127.0.0.1", 4), connect("127.0.0.2", 5)
        assert peers.enforce() == {}
        more = connect("127.0.0.1", 7)
        assert peers.enforce() == {"127.0.0.1": 6}
        for connection in (*first, *other, *more):
            connection.setblocking(False)
        assert [is_open(connection) for connection in (*first, *other)] == [True] * 9
        assert sum(map(is_open, more)) == 1


def is_open(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) != b""
    except BlockingIOError:
        return True
