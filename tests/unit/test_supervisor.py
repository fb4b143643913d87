"""The supervisor, which starts a worker and restarts it when it dies. The workers here are a few lines of code."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from conftest import wait_until
from support.processes import is_running

READY = "print('listening on', sys.argv[1], flush=True); open(lives, 'a').write(f'{os.getpid()}\\n');"
"""Code of a worker that becomes ready, and notes its process id in `lives`."""

LIVE = "signal.pause()"
LIVED = "len(open(lives).readlines())"


@contextmanager
def supervised(
    tmp_path: Path, worker: str, listen: str = "127.0.0.1:0", gate: str = "None"
) -> "Iterator[subprocess.Popen[str]]":
    """Starts a supervisor whose workers run this code, in which `lives` is the path of a file, and with this gate."""
    lives = tmp_path / "lives"
    lives.touch()
    imports = f"import os, signal, sys; lives = {str(lives)!r}; "
    code = (
        "import sys\n"
        "from backhaul_runtime.process import logs\n"
        "from backhaul_runtime.process.addresses import parse_address\n"
        "from backhaul_server.worker import supervisor\n"
        "supervisor._FIRST_DELAY_S = supervisor._LONGEST_DELAY_S = 0.01\n"
        "with logs.set_up('worker'):\n"
        "    address = parse_address(sys.argv[1])\n"
        "    command = lambda text: [sys.executable, '-c', sys.argv[2], text]\n"
        f"    sys.exit(supervisor.supervise(address, command, {gate}))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, listen, imports + worker],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.terminate()  # the supervisor passes the signal to its worker
        process.communicate()


def lives(tmp_path: Path) -> list[int]:
    return [int(line) for line in (tmp_path / "lives").read_text().splitlines()]


@pytest.mark.slow
def has_lived(tmp_path: Path, times: int) -> bool:
    return len(lives(tmp_path)) == times


def test_a_worker_that_dies_is_restarted_at_the_same_address_and_announced_once(tmp_path: Path) -> None:
    with supervised(tmp_path, f"print(sys.argv[1], file=open(lives + '.addresses', 'a')); {READY} {LIVE}") as process:
        for number in range(1, 4):
            wait_until(partial(has_lived, tmp_path, number), f"life {number} has begun")
            if number < 3:
                os.kill(lives(tmp_path)[-1], signal.SIGKILL)
        process.terminate()
        printed, logged = process.communicate(timeout=240)
        assert process.returncode == 128 + signal.SIGTERM  # nothing in these workers handles it
    addresses = (tmp_path / "lives.addresses").read_text().split()
    assert len(set(addresses)) == 1
    assert printed == f"listening on {addresses[0]}\n"
    assert logged.count("The worker was ended by SIGKILL: it is restarted in") == 2
    assert logged.count("The worker runs again") == 2
    assert not any(map(is_running, lives(tmp_path)))


@pytest.mark.parametrize("code", [0, 2, 3])
def test_a_worker_that_ends_before_it_was_ready_is_not_restarted(code: int, tmp_path: Path) -> None:
    with supervised(tmp_path, f"print('why', file=sys.stderr); sys.exit({code})") as process:
        printed, logged = process.communicate(timeout=240)
        assert (process.returncode, printed, logged) == (code, "", "why\n")


def test_a_worker_that_exits_with_zero_is_not_restarted(tmp_path: Path) -> None:
    with supervised(tmp_path, READY) as process:
        printed, logged = process.communicate(timeout=240)
        assert (process.returncode, printed.count("\n"), logged) == (0, 1, "")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_supervisor_ends_with_the_exit_code_of_a_stopped_worker(number: signal.Signals, tmp_path: Path) -> None:
    worker = f"signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); {READY} {LIVE}"
    with supervised(tmp_path, worker) as process:
        wait_until(lambda: lives(tmp_path) != [], "it lives")
        process.send_signal(number)
        process.communicate(timeout=240)
        assert process.returncode == 0


@pytest.mark.slow
def test_the_supervisor_gives_up_on_a_worker_that_never_gets_ready_again(tmp_path: Path) -> None:
    with supervised(tmp_path, f"{LIVED} and sys.exit(5); {READY} os.kill(os.getpid(), signal.SIGABRT)") as process:
        _, logged = process.communicate(timeout=240)
        assert process.returncode == 5
    assert len(lives(tmp_path)) == 1
    assert "The worker was ended by SIGABRT: it is restarted in 0 s" in logged
    assert "20 workers in a row died before they were ready: the supervisor gives up" in logged


@pytest.mark.slow
def test_the_supervisor_keeps_the_port_while_no_worker_runs(tmp_path: Path) -> None:
    with supervised(tmp_path, f"{READY} {LIVE}") as process:
        assert process.stdout is not None
        port = int(process.stdout.readline().rpartition(":")[2])
        with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
            other.bind(("127.0.0.1", port))
        # The worker itself can bind the port, because it allows reuse like gRPC does.
        with socket.socket() as worker:
            worker.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            worker.bind(("127.0.0.1", port))
            worker.listen()
            with supervised(tmp_path, READY, f"127.0.0.1:{port}") as second:
                _, printed = second.communicate(timeout=240)
                assert second.returncode == 2
            assert printed == f'backhaul worker: can\'t listen on "127.0.0.1:{port}": Address already in use\n'


@pytest.mark.parametrize("listen", ["localhost:0", "127.0.0.1:0"])
def test_a_free_port_is_found_for_every_way_to_write_it(listen: str, tmp_path: Path) -> None:
    with supervised(tmp_path, f"{READY} {LIVE}", listen) as process:
        assert process.stdout is not None
        address, _, port = process.stdout.readline().strip().removeprefix("listening on ").rpartition(":")
        assert (address, int(port) > 0) == (listen.rpartition(":")[0], True)


def test_a_worker_runs_only_while_others_do_not_use_the_machine(tmp_path: Path) -> None:
    usage = tmp_path / "usage"
    usage.write_text("100")
    gate = f"idleness.Idleness(0.1, lambda _: float(open({str(usage)!r}).read() or 100), 10.0, 'CPU')"
    worker = f"signal.signal(signal.SIGTERM, lambda *_: sys.exit()); {READY} {LIVE}"
    imports = "import backhaul_server.worker.idleness as idleness; supervisor._LOOK_INTERVAL_S = 0.01"
    with supervised(tmp_path, worker, gate=f"[exec({imports!r}), {gate}][1]") as process:
        time.sleep(0.3)
        assert lives(tmp_path) == []
        for number in range(1, 3):
            usage.write_text("0")
            wait_until(partial(has_lived, tmp_path, number), f"worker {number} has started")
            usage.write_text("100")
            wait_until(lambda: not is_running(lives(tmp_path)[-1]), f"worker {number} has gone")
        process.terminate()
        _, logged = process.communicate(timeout=240)
        assert process.returncode == 0
    assert logged.count("Others use the CPU: the worker ends when it has finished what is in flight.") == 2
    waits = logged.count("The worker starts when others have not used the CPU for 0.1 s.")
    assert waits in {2, 3}  # the third wait begins only if SIGTERM comes after it
    assert "it is restarted" not in logged
