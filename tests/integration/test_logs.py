"""What commands write to stderr, under load and when things go wrong."""

import io
import json
import logging
import os
import pty
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime

import grpc
import pytest
import torch
from torch import nn

import backhaul
from backhaul import SegmentUnknownError, Session
from backhaul._worker_client.connection.embedded import EmbeddedWorker
from backhaul_proto.v1 import segment_pb2
from conftest import QUIET, quiet, settle, wait_until
from support.dashboards import Dashboard
from support.nursery import ForkedCommand, run
from support.processes import WorkerProcess
from support.wire import Asked, Services

FAILING = (
    "import sys\n"
    "from backhaul._cli.main import main\n"
    "from backhaul_server.worker.engine.worker import Worker\n"
    "def fail(*_, **__):\n"
    "    raise ZeroDivisionError('a bug\\nof two lines')\n"
    "Worker.gradients = fail\n"
    "sys.exit(main())\n"
)
"""A worker with a bug that each backward meets."""

FAILING_PAGE = (
    "import sys\n"
    "from starlette.staticfiles import StaticFiles\n"
    "from backhaul._cli.main import main\n"
    "def fail(*_, **__):\n"
    "    raise ZeroDivisionError('a bug')\n"
    "StaticFiles.get_response = fail\n"
    "sys.exit(main())\n"
)
"""A dashboard whose assets can't be served."""


def lines(text: str) -> list[dict[str, object]]:
    """Each line as the object that it must be."""
    logged = [json.loads(line) for line in text.splitlines()]
    for line in logged:
        assert datetime.fromisoformat(str(line["time"])).utcoffset() is not None
        assert {"level", "command", "logger", "message"} <= set(line)
    return logged


def named(logged: Iterable[dict[str, object]], message: str) -> list[dict[str, object]]:
    return [line for line in logged if message in str(line["message"])]


def train(session: Session, calls: int = 4) -> None:
    block, x = nn.Linear(32, 32), torch.randn(8, 32, requires_grad=True)
    for _ in range(calls):
        session.checkpoint(block, x, returns="gradients").sum().backward()


@pytest.mark.slow
def test_a_worker_logs_json_under_load_with_the_trainers_session() -> None:
    with WorkerProcess("--memory", "1GiB") as worker:
        with (
            backhaul.connect(worker.address, settings=QUIET) as one,
            backhaul.connect(worker.address, settings=QUIET) as other,
            ThreadPoolExecutor(2) as pool,
        ):
            list(pool.map(train, [one, other]))
        logged = lines(worker.end())
    assert {line["session"] for line in named(logged, "opened a session")} == {one.run, other.run}
    assert {line["session"] for line in named(logged, "is closed")} == {one.run, other.run}
    assert {(line["level"], line["command"], line["logger"]) for line in logged} == {
        ("INFO", "worker", "backhaul.worker")
    }


@pytest.mark.slow
def test_an_error_is_one_line_that_says_of_which_segment() -> None:
    with WorkerProcess("--memory", "1GiB", program=("-c", FAILING)) as worker:
        with backhaul.connect(worker.address, settings=QUIET) as session:
            train(session, calls=1)
            assert session.report().fallbacks == 1
        (line,) = named(lines(worker.end()), "A request failed")
    assert (line["level"], line["session"], line["segment"]) == ("ERROR", session.run, "Linear")
    assert str(line["exception"]).endswith("ZeroDivisionError: a bug\nof two lines")


@pytest.mark.slow
def test_what_a_worker_refuses_is_there_for_those_who_ask() -> None:
    with WorkerProcess("--memory", "1GiB", environment={"BACKHAUL_LOG_LEVEL": "debug"}) as worker:
        with (
            backhaul.connect(worker.address, settings=QUIET) as session,
            grpc.insecure_channel(worker.address) as wire,
        ):
            settle(session)
            worker_session = session._workers[0].connection.up
            assert worker_session is not None
            request = segment_pb2.RecomputeRequest(key=segment_pb2.OperationKey(segment=999))
            with pytest.raises(SegmentUnknownError):
                next(Asked(Services(wire).segments, worker_session.session, recompute=request))
        logged = worker.end()
    (line,) = named(lines(logged), "refused: SegmentUnknownError")
    assert (line["level"], line["session"]) == ("DEBUG", session.run)
    assert worker_session.session not in logged  # it opens the session


@pytest.mark.slow
def test_a_trainer_that_is_gone_is_named() -> None:
    code = "import backhaul, os, sys; print(backhaul.connect(sys.argv[1]).run, flush=True); os.kill(os.getpid(), 9)"
    with WorkerProcess("--memory", "1GiB", "--lease", "0.2") as worker:
        trainer = run("-c", code, worker.address)
        wait_until(lambda: "ran out" in worker.logged(), "the lease runs out")
        (line,) = named(lines(worker.end()), "The lease of")
    assert (line["level"], line["session"]) == ("WARNING", trainer.stdout.strip())


@pytest.mark.slow
def test_a_dashboard_logs_json_also_what_its_server_says() -> None:
    with Dashboard("127.0.0.1:1", program=("-c", FAILING_PAGE)) as dashboard:
        assert dashboard.get("/healthz").status_code == 200
        assert dashboard.get("/static/x.css").status_code == 500
        wait_until(lambda: "Exception in ASGI application" in dashboard.logged(), "the error is logged")
        (line,) = named(lines(dashboard.logged()), "Exception in ASGI application")
    assert (line["level"], line["command"], line["logger"]) == ("ERROR", "dashboard", "uvicorn.error")
    assert str(line["exception"]).endswith("ZeroDivisionError: a bug")


@pytest.mark.slow
def test_a_terminal_gets_text() -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal:
        process = ForkedCommand(["worker", "--listen", "127.0.0.1:0"], terminal)
    assert process.stdout is not None
    process.stdout.readline()
    process.terminate()
    process.communicate(timeout=240)
    process.stdout.close()
    shown = os.read(ours, 65536).decode()
    os.close(ours)
    assert " INFO backhaul.worker: The worker is stopping: " in shown
    assert "{" not in shown


def test_the_trainers_log_says_which_session_segment_and_step(
    session: Session, caplog: pytest.LogCaptureFixture
) -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(context: object, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

        @staticmethod
        def backward(context: object, *gradients: torch.Tensor) -> torch.Tensor:
            return 2 * gradients[0]

    def doubled(x: torch.Tensor) -> torch.Tensor:
        return Twice.apply(x).exp()

    train(session, calls=1)
    session.step()
    session.checkpoint(doubled, torch.randn(3, requires_grad=True)).sum().backward()
    (record,) = [record for record in caplog.records if "keeps its activations on the trainer" in record.getMessage()]
    assert record.name == "backhaul"
    assert record.__dict__["session"] == session.run
    assert record.__dict__["segment"].endswith("doubled")
    assert record.__dict__["step"] == 1


@pytest.mark.slow
def test_an_embedded_worker_is_heard_as_loud_as_it_speaks_and_has_its_settings_from_its_session(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "backhaul")
    monkeypatch.setenv("BACKHAUL_WORKER_MEMORY", "lots")
    monkeypatch.setenv("BACKHAUL_LOG_FORMAT", "xml")
    with backhaul.connect(settings=quiet(memory_bytes=1 << 30)) as session:
        wait_until(lambda: "opened a session" in caplog.text, "its line has come")
        train(session, calls=1)
        assert session.report().remote == 1
    (record,) = [record for record in caplog.records if "opened a session" in record.getMessage()]
    assert (record.name, record.levelname) == ("backhaul.worker", "INFO")
    assert record.__dict__["session"] == session.run


def test_what_an_embedded_worker_said_last_can_be_read(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "backhaul")
    error = {
        "level": "ERROR",
        "message": "ended by an error",
        "exception": "Traceback\nOSError: no",
        "segment": "Block",
    }
    tail: list[str] = []
    worker = EmbeddedWorker(0, 1.0)
    worker._pass_on(io.StringIO(f"{json.dumps(error)}\nKilled\n"), tail)
    assert tail == ["ended by an error\nTraceback\nOSError: no", "Killed"]
    worker.interrupt()
    worker._pass_on(io.StringIO(json.dumps(error)), [])
    worker.close()
    own = ("worker: ended by an error", "worker: Killed")  # a worker of another test may still be speaking
    first, second, third = [record for record in caplog.records if record.getMessage().startswith(own)]
    assert (first.levelname, first.getMessage()) == ("ERROR", f"worker: {tail[0]}")
    assert first.__dict__["segment"] == "Block"
    assert (second.levelname, second.getMessage()) == ("DEBUG", "worker: Killed")
    assert third.levelname == "DEBUG"  # it was asked to end


TRAINING = """
import logging, sys
if "{configured}":
    logging.basicConfig(format="mine %(message)s")
from backhaul import connect
logging.getLogger("backhaul").warning("Worker a:1 was lost.")
import grpc
channel = grpc.secure_channel("{address}", grpc.ssl_channel_credentials())
try:
    channel.unary_unary("/a/b")(b"", timeout=10)
except grpc.RpcError:
    pass
"""


@pytest.mark.parametrize(("configured", "line"), [("", "backhaul: "), ("yes", "mine ")])
def test_a_training_sees_lines_with_a_prefix_and_none_of_grpc(
    worker: WorkerProcess, configured: str, line: str
) -> None:
    program = TRAINING.format(configured=configured, address=worker.address)  # the worker speaks no TLS: gRPC complains
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stderr == f"{line}Worker a:1 was lost.\n"
