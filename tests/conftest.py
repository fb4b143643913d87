"""Fixtures: a real worker process, sessions on it, and what must be left behind by each test, which is nothing."""

import gc
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

import backhaul
from backhaul import Session
from support.loopback import Loopback
from support.processes import WorkerProcess, open_files

QUIET_S = 10.0
"""A machine shared by many can starve a worker for seconds: tests that are not about silence allow for it."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Two cores, two processes: and a known state of torch's generators for each test."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield


@pytest.fixture(scope="session")
def worker() -> Iterator[WorkerProcess]:
    """A worker that all tests share; none may kill it."""
    with WorkerProcess("--memory", "2GiB") as process:
        yield process


@pytest.fixture
def own_worker() -> Iterator[WorkerProcess]:
    """A worker for one test to do with as it likes."""
    with WorkerProcess("--memory", "1GiB") as process:
        yield process


@pytest.fixture
def session(worker: WorkerProcess) -> Iterator[Session]:
    """A session on the shared worker. Whatever a test does with it, nothing stays on the worker, nor of its threads."""
    threads, files = threading.active_count(), open_files()
    with backhaul.connect(worker.address, silence_s=QUIET_S) as session:
        yield session
        gc.collect()
        wait_until(lambda: sum(s.segments for s in worker.telemetry().sessions) == 0, "segments are released")
    wait_until(lambda: threading.active_count() <= threads, "threads end")
    wait_until(lambda: open_files() <= files, "files are closed")


@pytest.fixture
def loopback() -> Loopback:
    """Segments run here, through the whole codec but without a wire."""
    return Loopback()


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 10.0) -> None:
    """Returns when the condition holds, fails when it does not in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"timed out before {what}"
        time.sleep(0.01)
