"""Trainer and worker on one host: large tensors through memory they share, over the worker's own socket."""

import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import backhaul
from backhaul import Session
from backhaul_runtime.process.addresses import parse_address
from backhaul_runtime.wire.shared_memory import LEAST_BYTES
from conftest import QUIET, quiet, settle, wait_until
from support.bits import Checkpoint, plainly
from support.nursery import run
from support.processes import WorkerProcess
from support.proxy import SlowProxy

WIDTH = 600  # a weight, a boundary and a saved tensor have more than LEAST_BYTES


@pytest.fixture
def sockets(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where sockets of workers started in this test are. When it ends there must be none."""
    with tempfile.TemporaryDirectory() as directory:  # not tmp_path, which is too long for a socket
        monkeypatch.setenv("TMPDIR", directory)
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield Path(directory)
        assert [path for path in Path(directory).rglob("*") if path.is_socket()] == []


def mapped(pid: int | str = "self") -> int:
    """Regions of shared memory that a process has."""
    return Path(f"/proc/{pid}/maps").read_text().count("memfd:backhaul")


def opened(pid: int | str = "self") -> list[str]:
    """What a process has of them in its table of files."""
    targets = [str(file.readlink()) for file in Path(f"/proc/{pid}/fd").iterdir() if file.is_symlink()]
    return [target for target in targets if "memfd:backhaul" in target]


def gradients(checkpoint: Checkpoint, steps: int = 3) -> list[Tensor]:
    """Of two blocks, in some steps."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(2)]
    collected = []
    for _ in range(steps):
        x = torch.randn(WIDTH, WIDTH, requires_grad=True)
        h = x
        for block in blocks:
            h = checkpoint(block, h)
        h.square().sum().backward()
        collected += [tensor.grad for block in blocks for tensor in (x, *block.parameters()) if tensor.grad is not None]
        for block in blocks:
            block.zero_grad()
            with torch.no_grad():
                block.get_parameter("0.weight").mul_(0.9)
    return collected


def share(session: Session) -> None:
    """Returns when the session and its worker share memory both ways: who finds no room sends chunks and asks."""

    def both_ways() -> bool:
        memory = session._workers[0].connection._memory
        assert memory is not None
        session.checkpoint(torch.sin, torch.randn(LEAST_BYTES // 2, requires_grad=True)).sum().backward()
        memory._poll()
        return bool(memory._inbox) and memory._outbox.lacks_bytes(0) < 0

    wait_until(both_ways, "memory is shared")


@pytest.mark.slow
def test_gradients_through_shared_memory(session: Session, worker: WorkerProcess, returns: str) -> None:
    share(session)
    before = session.report()
    ours = gradients(lambda *args: session.checkpoint(*args, returns=returns))
    assert all(map(torch.equal, ours, gradients(plainly)))
    report = session.report()
    assert report.fallbacks == 0
    sent, received = report.up_bytes - before.up_bytes, report.down_bytes - before.down_bytes
    boundary = 4 * WIDTH * WIDTH
    assert sent > 3 * 4 * boundary  # two weights and two boundaries in each step, counted as if by socket
    assert received > 3 * boundary
    assert mapped() > 0
    assert mapped(worker.pid) > 0


@pytest.mark.slow
def test_a_session_that_ends_leaves_no_memory(worker: WorkerProcess) -> None:
    with backhaul.connect(worker.address, settings=QUIET) as session:
        share(session)
        gradients(session.checkpoint)
        assert opened(worker.pid) != []
    wait_until(lambda: mapped(worker.pid) == 0, "the worker has unmapped")
    assert opened(worker.pid) == opened() == []
    assert mapped() == 0


@pytest.mark.slow
@pytest.mark.parametrize("side", ["trainer", "worker"])
def test_off_with_one_flag_each(side: str, sockets: Path) -> None:
    flags = ["--no-shared-memory", "--no-unix-socket"] if side == "worker" else []
    options: dict[str, Any] = {"shared_memory": False, "unix_socket": False} if side == "trainer" else {}
    with WorkerProcess(*flags) as worker:
        with backhaul.connect(worker.address, settings=quiet(**options)) as session:
            assert all(map(torch.equal, gradients(session.checkpoint), gradients(plainly)))
            assert session.report().fallbacks == 0
            assert not session._workers[0].connection._has_switched
        assert mapped() == mapped(worker.pid) == 0
        assert any(path.is_socket() for path in sockets.rglob("*")) == (side == "trainer")


@pytest.mark.slow
def test_a_trainer_goes_on_over_the_workers_socket_and_back_where_that_is_gone(sockets: Path) -> None:
    with (
        WorkerProcess() as worker,
        backhaul.connect(worker.address, settings=backhaul.Settings(silence_s=1.0)) as session,
    ):
        connection = session._workers[0].connection
        assert connection._has_switched
        for path in sockets.rglob("*.sock"):
            path.unlink()
        worker_session = connection.up
        assert worker_session is not None
        connection._use(connection._channel_to(parse_address(f"unix:{sockets}/gone.sock")), has_switched=True)
        wait_until(
            lambda: not connection._has_switched and connection.up is worker_session, "the session is kept over TCP"
        )


@pytest.mark.slow
def test_a_token_is_not_shown_to_a_socket_that_others_could_have_made(sockets: Path) -> None:
    with WorkerProcess() as worker:
        (directory,) = sockets.iterdir()
        directory.chmod(0o755)
        with backhaul.connect(worker.address, settings=QUIET) as session:
            assert not session._workers[0].connection._has_switched


@pytest.mark.slow
def test_a_worker_that_can_have_no_sockets_offers_none(sockets: Path) -> None:
    (sockets / f"backhaul-{os.geteuid()}").touch()
    with WorkerProcess() as worker, backhaul.connect(worker.address, settings=QUIET) as session:
        assert "Trainers on this machine are offered no Unix socket or shared memory" in worker.logged()
        assert session._workers[0].connection._memory is None
        assert all(map(torch.equal, gradients(session.checkpoint), gradients(plainly)))
        assert session.report().fallbacks == 0


def test_what_is_behind_a_proxy_stays_there(worker: WorkerProcess) -> None:
    with SlowProxy(worker.address, 0.0) as proxy, backhaul.connect(proxy.address, settings=QUIET) as session:
        settle(session)
        assert not session._workers[0].connection._has_switched
        assert session._workers[0].connection._memory is None


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_refused(sockets: Path) -> None:
    with WorkerProcess(listen=f"unix:{sockets}/b.sock") as worker:
        for path in [*sockets.parents, sockets]:
            path.chmod(path.stat().st_mode | 0o011)
        (sockets / "b.sock.memory").chmod(0o777)
        code = (
            "import os, socket, sys\n"
            "os.setuid(65534)\n"
            "peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
            "peer.connect(sys.argv[1])\n"
            "print(peer.recv(64))\n"
        )
        command = [sys.executable, "-c", code, f"{sockets}/b.sock.memory"]
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "b''\n"
        assert "A process of another user asked for shared memory, and was refused." in worker.logged()


@pytest.mark.parametrize("name", [b"0" * 32, b"\xff", b"0" * 200], ids=["unknown", "no text", "long"])
def test_who_names_no_session_gets_nothing(name: bytes, session: Session) -> None:
    memory = session._workers[0].connection._memory
    assert memory is not None
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
        peer.connect(memory._path)
        peer.send(name)
        assert peer.recv(64) == b""


@pytest.mark.slow
@pytest.mark.parametrize("said", [b"?", b"\x09" + bytes(8), b"\x01" + b"\xff" * 8, b"\x02" + b"\xff" * 8])
def test_what_no_trainer_says_ends_no_more_than_its_own_sharing(said: bytes, session: Session) -> None:
    memory = session._workers[0].connection._memory
    assert memory is not None
    assert memory._peer is not None
    memory._peer.send(said)
    assert all(map(torch.equal, gradients(session.checkpoint), gradients(plainly)))
    assert session.report().fallbacks == 0


@pytest.mark.slow
def test_a_worker_that_is_killed_leaves_nothing(sockets: Path) -> None:
    with backhaul.connect(settings=quiet(memory_bytes=2 << 30)) as session:
        assert session._embedded is not None
        share(session)
        kept: list[Tensor] = []

        def checkpoint(block: nn.Module, x: Tensor) -> Tensor:
            y: Tensor = session.checkpoint(block, x)
            if session._embedded is not None and not kept and (pid := session._embedded.pid):
                os.kill(pid, signal.SIGKILL)
            kept.append(y)
            return y

        assert all(map(torch.equal, gradients(checkpoint), gradients(plainly)))
        assert session.report().fallbacks > 0
    assert mapped() == 0
    assert opened() == []
    assert list(sockets.iterdir()) == []


@pytest.mark.slow
def test_sockets_are_their_users_alone_and_go_with_the_next_worker_where_one_is_killed(sockets: Path) -> None:
    with WorkerProcess() as first:
        (directory,) = sockets.iterdir()
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        first.kill()
        left = [path for path in sockets.rglob("*") if path.is_socket()]
        with WorkerProcess():
            assert len(left) == 2
            assert not any(path.exists() for path in left)


@pytest.mark.slow
def test_a_trainer_that_is_killed_leaves_nothing(sockets: Path) -> None:
    code = (
        "import backhaul, os, signal, sys, torch\n"
        "sys.path.insert(0, os.environ['TESTS'])\n"
        "from integration.test_shared_memory import gradients, share\n"
        "session = backhaul.connect(sys.argv[1], settings=backhaul.Settings(silence_s=240))\n"
        "share(session)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    with WorkerProcess("--lease", "1") as worker:
        tests = str(Path(__file__).parent.parent)
        assert run("-c", code, worker.address, TESTS=tests).returncode == -signal.SIGKILL
        wait_until(lambda: mapped(worker.pid) == 0, "the lease has run out")
        assert opened(worker.pid) == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_the_child_of_a_fork_has_none_of_it(session: Session) -> None:
    share(session)
    child = os.fork()
    if not child:
        os._exit(0 if mapped() == 0 and opened() == [] else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert all(map(torch.equal, gradients(session.checkpoint), gradients(plainly)))
    assert session.report().fallbacks == 0
