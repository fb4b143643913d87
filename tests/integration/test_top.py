"""`backhaul top` in a pipe and in a terminal."""

import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from backhaul_proto.v1 import telemetry_pb2
from conftest import wait_until
from contract.test_layout import modules_after
from support import nursery
from support.processes import open_files
from support.reporting import FakeWorker, Training

TOKEN = "a-token-that-only-this-test-knows"


@pytest.fixture
def fake() -> Iterator[FakeWorker]:
    with FakeWorker() as worker:
        yield worker


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address at which nobody answers."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


def top(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return nursery.run("top", *arguments, **{"COLUMNS": "200", **environment})


def row(output: str, first: str) -> list[str]:
    """Cells of the line that begins with that."""
    (line,) = [line for line in output.splitlines() if line.startswith(f"{first} ")]
    return re.split(r"\s{2,}", line.strip())


def train(worker: FakeWorker, **changed: object) -> Training:
    """Ten steps of a trainer that just ended its last, which holds four segments on the worker."""
    training = Training(workers=[worker.address], began_at_s=time.time() - 4)
    report = training.report(range(9))
    report.steps.append(training.step(9, **changed))
    with worker.lock:
        worker.telemetry.sessions.add(run=training.run, trainer="gpu-box:4711", segments=4, client_version="0.1.0")
        worker.telemetry.memory.segment_bytes = 1 << 30
        worker.telemetry.queued_requests = 3
    worker.tell(report)
    return training


@pytest.mark.slow
def test_workers_and_trainers_are_shown_once(fake: FakeWorker) -> None:
    train(fake, fallbacks=2, on_trainer=2)
    process = top(fake.address, "--once")
    assert (process.returncode, process.stderr) == (0, "")
    assert row(process.stdout, fake.address) == [fake.address, "serving", "25 % of 4 GiB", "1", "4", "3"]
    assert row(process.stdout, "gpu-box:4711") == ["gpu-box:4711", "running", "9", "400", "40", "2", "114.4 MiB", "2.3"]
    headline = process.stdout.splitlines()[0]
    assert "1 of 1 workers serve" in headline
    assert "2 fallbacks in 5 min" in headline
    rate = re.search(r"· (\S+) steps/s · 114.4 MiB saved · -72 ms per step", headline)
    assert rate is not None
    assert 0.1 < float(rate[1]) <= 10  # ten steps, the first four seconds ago: how much later they are looked at varies
    assert "FallbackRateHigh: " in process.stdout


@pytest.mark.slow
def test_an_output_that_is_no_terminal_gets_one_table(fake: FakeWorker) -> None:
    process = top(fake.address)
    assert process.returncode == 0
    assert process.stdout.count(fake.address) == 1
    assert "\x1b" not in process.stdout


@pytest.mark.slow
def test_it_fits_eighty_columns(fake: FakeWorker) -> None:
    train(fake)
    process = top(fake.address, COLUMNS="80")
    assert max(len(line.rstrip()) for line in process.stdout.splitlines()) <= 80
    assert len(row(process.stdout, "gpu-box:4711")) == 8
    assert "…" not in process.stdout


@pytest.mark.slow
def test_a_narrow_terminal_shows_fewer_columns_and_cuts_none(fake: FakeWorker) -> None:
    train(fake)
    process = top(fake.address, COLUMNS="60")
    assert row(process.stdout, "gpu-box:4711") == ["gpu-box:4711", "running", "9", "400", "0", "114.4 MiB"]
    assert row(process.stdout, fake.address)[:4] == [fake.address, "serving", "25 % of 4 GiB", "1"]
    assert "…" not in process.stdout


@pytest.mark.slow
def test_a_worker_out_of_reach_is_shown_beside_the_others(fake: FakeWorker, nobody: str) -> None:
    process = top(nobody, fake.address)
    assert process.returncode == 0
    assert row(process.stdout, nobody) == [nobody, "unreachable"]
    assert re.search(rf"^{nobody}: nothing listens at its address", process.stdout, re.MULTILINE)
    assert row(process.stdout, fake.address)[1] == "serving"


@pytest.mark.slow
def test_nobody_at_all_is_a_failure(nobody: str) -> None:
    process = top(nobody, "--once")
    assert process.returncode == 1
    assert row(process.stdout, nobody) == [nobody, "unreachable"]


class LateOnce(FakeWorker):
    """A worker that misses the first poll, as one on a busy machine does."""

    missed = False

    def GetTelemetry(self, request: telemetry_pb2.GetTelemetryRequest, context: Any) -> Any:  # noqa: N802
        while not self.missed and context.is_active():
            time.sleep(0.05)
        self.missed = True
        return super().GetTelemetry(request, context)


@pytest.mark.slow
def test_a_worker_that_answers_late_once_is_asked_again() -> None:
    with LateOnce() as worker:
        process = top(worker.address, "--once")
    assert process.returncode == 0
    assert row(process.stdout, worker.address)[1] == "serving"


@pytest.mark.slow
def test_a_worker_that_wants_a_token_is_shown_it(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN)
    file.chmod(0o600)
    with FakeWorker(TOKEN) as worker:
        without, shown = top(worker.address), top(worker.address, "--worker-token-file", str(file))
    assert (without.returncode, shown.returncode) == (1, 0)
    assert "token" in without.stdout
    assert TOKEN not in shown.stdout + shown.stderr


@pytest.mark.slow
def test_what_others_say_is_no_markup_and_no_control_sequence(fake: FakeWorker) -> None:
    with fake.lock:
        fake.telemetry.last_error = "[bold]no\x1b[2J\nroom[/bold] :rocket:"
        fake.telemetry.last_error_at_s = time.time()
    process = top(fake.address)
    assert f"{fake.address}: [bold]no [2J room[/bold] :rocket:" in process.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], '"nowhere" can\'t be read'),
        (["a:1", "a:1"], "stands twice"),
        (["a:1", "--worker-token-file", "/nowhere/token"], "can't be read"),
        (["a:1", "--worker-token-file", "x", "y"], "2 token files are given for 1 addresses"),
    ],
)
def test_a_bad_option_is_named(arguments: list[str], message: str) -> None:
    process = top(*arguments)
    assert process.returncode == 2
    assert message in process.stderr


@pytest.mark.slow
def test_it_needs_neither_torch_nor_fastapi(nobody: str) -> None:
    code = (
        "from contextlib import redirect_stdout\nimport io\nfrom backhaul._cli.main import main\n"
        f"with redirect_stdout(io.StringIO()):\n    assert main(['top', '{nobody}']) == 1"
    )
    assert not modules_after(code) & {"torch", "numpy", "fastapi", "starlette", "uvicorn", "prometheus_client"}


class Terminal:
    """`backhaul top` in a terminal of its own, and all that it wrote."""

    def __init__(self, *arguments: str) -> None:
        self.ours, theirs = pty.openpty()
        command = [sys.executable, "-m", "backhaul", "top", *arguments]
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"}
        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
        )
        os.close(theirs)
        self.written = ""

    def shows(self, text: str) -> bool:
        """Whether it has written that since it was asked for something that it had."""
        while select.select([self.ours], [], [], 0)[0]:
            try:
                self.written += os.read(self.ours, 1 << 16).decode()
            except OSError:  # the other end is closed
                break
        if text not in self.written:
            return False
        self.written = self.written.partition(text)[2]
        return True

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.ours)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_terminal_is_refreshed_and_left_as_it_was(fake: FakeWorker, number: signal.Signals) -> None:
    files = open_files()
    terminal = Terminal(fake.address)
    try:
        wait_until(lambda: terminal.shows(fake.address) and terminal.shows("serving"), "the worker is shown")
        with fake.lock:
            fake.telemetry.draining = True
        wait_until(lambda: terminal.shows("draining"), "it is shown again")
        fake.hung.set()  # what is asked for at that moment does not hold it up
        terminal.process.send_signal(number)
        assert terminal.process.wait(60) == 0
        assert terminal.shows("\x1b[?25h") and terminal.shows("\x1b[?1049l")  # the cursor, and the screen as it was
    finally:
        terminal.close()
    assert open_files() == files


@pytest.mark.slow
def test_telemetry_of_a_stranger_does_no_harm(fake: FakeWorker) -> None:
    with fake.lock:
        fake.telemetry.memory.budget_bytes = 0
        fake.telemetry.memory.segment_bytes = 2**64 - 1
        fake.telemetry.sessions.add(segments=2**32 - 1, drift=float("nan"))
    fake.tell(telemetry_pb2.TrainerReport(run=telemetry_pb2.Run(id="x" * 1000)))
    assert top(fake.address).returncode == 0
