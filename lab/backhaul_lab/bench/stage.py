"""The two cores of a measurement, and the processes that it starts on them."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Self

from backhaul_lab.bench.noise import Core, pin

if TYPE_CHECKING:
    from backhaul._session import Session

OVER_TCP: Mapping[str, Any] = {"shared_memory": False, "unix_socket": False}
"""Options of a session that uses TCP for a worker on the same host, as for a worker on another host."""
_START_S = 60.0
_END_S = 5.0


@dataclass
class Stage:
    """Two cores and the processes on them. A context manager that ends its processes in reverse order on exit.

    Attributes:
        trainer: The core of this process, the trainer.
        worker: The core of the workers.
    """

    trainer: Core
    worker: Core
    _started: ExitStack = field(default_factory=ExitStack)

    @classmethod
    def of(cls, trainer_core: int, worker_core: int, pid: int) -> "Stage":
        """Creates a stage whose trainer is the process with this pid."""
        return cls(Core(trainer_core, [pid]), Core(worker_core))

    @property
    def cores(self) -> list[Core]:
        """The trainer's and the worker's core, in this order."""
        return [self.trainer, self.worker]

    def session(self, worker: str | None = None, **options: Any) -> "Session":
        """Opens a session with `backhaul.connect`. If that starts a worker, the worker runs on the worker's core."""
        import backhaul

        before = set(descendants(os.getpid()))
        session = backhaul.connect(worker, **options)
        self._started.callback(session.close)
        for pid in set(descendants(os.getpid())) - before:
            pin(self.worker.number, pid)
            self.worker.pids.append(pid)
        return session

    def tcp_worker(self, *options: str) -> str:
        """Starts a worker that listens on TCP. Returns its address as "host:port"."""
        line = self.start([sys.executable, "-P", "-m", "backhaul", "worker", "--listen", "127.0.0.1:0", *options])[1]
        return line.rpartition(" ")[2]

    def start(
        self,
        command: Sequence[str],
        core: Core | None = None,
        environment: Mapping[str, str] | None = None,
        timeout_s: float = _START_S,
    ) -> tuple["subprocess.Popen[str]", str]:
        """Starts a process on a core, the worker's by default.

        Args:
            command: The program to run and its arguments.
            core: The core; None for the worker's.
            environment: Variables that are added to the environment.
            timeout_s: Seconds within which the process must print a line.

        Returns:
            The process and its first line on stdout.

        Raises:
            RuntimeError: The process printed no line in time. It was ended.
        """
        core = core or self.worker
        with _inherited(core.number):
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **(environment or {})},
                start_new_session=True,  # A process group of its own, so that its children are killed too.
            )
        try:
            line = read_line(process.stdout, timeout_s, command)
        except RuntimeError:
            _end(process)
            raise
        self._started.callback(_end, process)
        core.pids += [process.pid, *descendants(process.pid)]
        return process, line

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._started.close()


def read_line(pipe: IO[str] | None, timeout_s: float, what: object = "a process") -> str:
    """Returns the next line of a process. Raises RuntimeError if none arrives in time."""
    assert pipe is not None
    ready, _, _ = select.select([pipe], [], [], timeout_s)
    line = pipe.readline().strip() if ready else ""
    if not line:
        raise RuntimeError(f"{what} printed nothing within {timeout_s:g} s, or has ended")
    return line


@contextmanager
def _inherited(core: int) -> Iterator[None]:
    """Makes processes that this thread starts run on another core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def descendants(pid: int) -> list[int]:
    """Returns the ids of all processes that a process has started directly or indirectly."""
    pids: list[int] = []
    with suppress(OSError):  # The process has just ended.
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (thread / "children").read_text().split()):
                pids += [child, *descendants(child)]
    return pids


def _end(process: "subprocess.Popen[str]") -> None:
    with suppress(ProcessLookupError):
        process.terminate()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(BrokenPipeError):
                pipe.close()
