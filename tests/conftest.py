"""Fixtures: a real worker process, sessions on it, and what must be left behind by each test, which is nothing."""

from __future__ import annotations

import gc
import importlib
import os
import re
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

import backhaul
from support.devices import DEVICE
from support.nursery import ForkingSubprocess
from support.processes import WorkerProcess, open_files

if TYPE_CHECKING:
    from backhaul import Session
    from support.bits import Checkpoint
    from support.loopback import Loopback

# Imports and collection make a million objects that stay. Looking through them again and again takes seconds.
gc.disable()

WITHOUT_TORCH = "WITHOUT_TORCH" in os.environ
"""Set by `make fast` for tests/pure: an import of torch then fails."""
if WITHOUT_TORCH:
    sys.modules["torch"] = None  # type: ignore[assignment]
else:
    import torch

    from support.bits import seed_generators

    # Torch's default, set explicitly, because torch 2.11 warns at the first sparse tensor otherwise.
    torch.sparse.check_sparse_tensor_invariants.disable()
    if DEVICE != "cpu":
        torch.set_default_device(DEVICE)

# A slow machine must not fail a test, so no example of Hypothesis has a limit of time.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

RETURNS = ["gradients", "activations"]
QUIET_S = 240.0
"""A machine shared by many can starve a worker for minutes: tests that are not about a limit of time allow for it.

A test that hangs is ended by pytest's timeout, which is longer.
"""


def quiet(**settings: Any) -> backhaul.Settings:
    """Settings with this patience, also for a worker that connect() starts."""
    return backhaul.Settings(**{"silence_s": QUIET_S, "connect_timeout_s": QUIET_S, **settings})


QUIET = quiet()


WHOLE_FOLDERS = ("browser", "libraries")
"""Folders whose tests all have the marker of that name."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Imports no tests that the command deselects as a folder or as a module: importing them takes seconds."""
    markers: list[str] = []
    if collection_path.parent == Path(__file__).parent and collection_path.name in WHOLE_FOLDERS:
        markers = [collection_path.name]
    elif collection_path.name.startswith("test_") and collection_path.suffix == ".py":
        marks = re.search(r"^pytestmark = (.*)", collection_path.read_text(), re.MULTILINE)
        markers = re.findall(r"pytest\.mark\.(\w+)", marks[1]) if marks else []
    return True if any(f"not {marker} " in f"{config.option.markexpr} " for marker in markers) else None


def pytest_collection_finish() -> None:
    """From here on the collector looks only at what tests make."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Gives each test one thread and a known state of torch's generators."""
    if not WITHOUT_TORCH:
        torch.set_num_threads(1)
        seed_generators(0)


@pytest.fixture(scope="session", autouse=True)
def no_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What dashboards keep unless told otherwise is not kept among the user's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="session", autouse=True)
def patient_trainers() -> Iterator[None]:
    """No limit of time that has a default expires on a slow machine. Tests of such a limit set it themselves.

    The variable is for trainers that tests start: what is set in this process does not reach them.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BACKHAUL_SILENCE_S", str(QUIET_S))
        if not WITHOUT_TORCH:
            deadlines = importlib.import_module("backhaul._worker_client.connection.deadlines")
            patch.setattr(deadlines, "SHORTEST_EXECUTION_LIMIT_S", QUIET_S)
            patch.setattr(deadlines, "SHORTEST_QUEUE_LIMIT_S", QUIET_S)
        yield


@pytest.fixture(scope="session", autouse=True)
def forked_workers() -> Iterator[None]:
    """The worker that connect() starts is forked. Tests of its start use `real_start`."""
    with pytest.MonkeyPatch.context() as patch:
        if not WITHOUT_TORCH:
            patch.setattr("backhaul._worker_client.connection.embedded.subprocess", ForkingSubprocess)
        yield


@pytest.fixture
def real_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker that connect() starts is a Python of its own, as for users."""
    monkeypatch.setattr("backhaul._worker_client.connection.embedded.subprocess", subprocess)


@pytest.fixture
def usual_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits of time of runs and queues that trainers have, for a test of these."""
    monkeypatch.setattr("backhaul._worker_client.connection.deadlines.SHORTEST_EXECUTION_LIMIT_S", 5.0)
    monkeypatch.setattr("backhaul._worker_client.connection.deadlines.SHORTEST_QUEUE_LIMIT_S", 1.0)


@pytest.fixture(scope="session")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    """A worker that all tests share; none may kill it. Nothing that they send it may ever become code."""
    noted = tmp_path_factory.mktemp("audit") / "events"
    with WorkerProcess("--memory", "2GiB", environment={"AUDIT_FILE": str(noted)}) as process:
        with backhaul.connect(process.address, settings=QUIET) as session:
            for returns in ("gradients", "activations"):
                x = torch.randn(3, requires_grad=True)
                session.checkpoint(torch.sin, x, returns=returns).sum().backward()
        warm_s = time.monotonic()
        yield process
        events = [line.split(" ", 1) for line in noted.read_text().splitlines()]
    later = [event for at_s, event in events if float(at_s) > warm_s]
    # A worker on CUDA looks for NVML once a minute, so that its dashboard shows the GPU's load.
    assert [event for event in later if "libnvidia-ml" not in event] == []
    assert events  # the hook was there


@pytest.fixture
def own_worker() -> Iterator[WorkerProcess]:
    """A worker for one test to do with as it likes."""
    with WorkerProcess("--memory", "1GiB") as process:
        yield process


@pytest.fixture
def equal_speeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets all workers count as equally fast, so that each gets as many segments."""
    monkeypatch.setattr("backhaul._worker_client.connection.connection.Connection.ran", lambda *_: None)


@pytest.fixture
def session(worker: WorkerProcess) -> Iterator[Session]:
    """A session on the shared worker. Whatever a test does with it, nothing stays on the worker, nor of its threads."""
    threads, files = threading.active_count(), open_files()
    with backhaul.connect(worker.address, settings=QUIET) as session:
        gc.collect()
        gc.freeze()  # what earlier tests have left need not be looked through again
        yield session
        gc.collect()
        settle(session)
        wait_until(lambda: _segments(worker, session) == 0, "segments are released")
    wait_until(lambda: threading.active_count() <= threads, "threads end")
    wait_until(lambda: open_files() <= files, "files are closed")


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """What torch.compile has compiled does not reach another test."""
    import torch

    with warnings.catch_warnings(action="ignore"):  # with a GPU the first reset imports modules that warn
        torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def whole_share(monkeypatch: pytest.MonkeyPatch, fresh_compiler: None) -> None:
    """Workers get the first four micro-batches of each block whole, however fast they are."""
    from support.whole import SHARE

    monkeypatch.setattr("backhaul._accumulate.whole_shares.WholeShares.first", lambda self: SHARE)


@pytest.fixture(params=RETURNS)
def returns(request: pytest.FixtureRequest) -> str:
    """What comes back."""
    return str(request.param)


@pytest.fixture
def checkpoint(session: Session, returns: str) -> Checkpoint:
    """Recomputes on the worker."""
    return partial(session.checkpoint, returns=returns)


@pytest.fixture
def loopback() -> Iterator[Loopback]:
    """Segments run here, through the whole codec but without a wire. Whatever they do, what they are given stays."""
    from support.loopback import Loopback

    loopback = Loopback()
    yield loopback
    assert loopback.changed() == []


def _segments(worker: WorkerProcess, session: Session) -> int:
    """What the worker stores for a session. Trainers that a test killed have theirs until their lease ends."""
    return sum(other.segments for other in worker.telemetry().sessions if other.run == session.run)


def settle(session: Session) -> None:
    """Returns when all that the session has queued for its workers is sent: each upload thread works in order."""
    for worker in session._workers if not session.closed else ():
        owner, sent = threading.Event(), threading.Event()
        worker.uploader.call_after(owner, sent.set)
        del owner
        assert sent.wait(QUIET_S)


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = QUIET_S) -> None:
    """Returns when the condition holds, fails when it does not in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"timed out before {what}"
        time.sleep(0.01)
