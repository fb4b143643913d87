"""The two cores of a measurement, and the processes that it starts on them."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from backhaul_lab.harness.core_times import Core, pin
from backhaul_lab.harness.processes import MODULE, ChildError, ChildProcess, descendants

if TYPE_CHECKING:
    from backhaul._session import Session

OVER_TCP: Mapping[str, Any] = {"shared_memory": False, "unix_socket": False}
"""Settings of a session that uses TCP for a worker on the same host, as for a worker on another host."""
_START_S = 60.0


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

    def session(self, worker: str | None = None, **arguments: Any) -> "Session":
        """Opens a session with `backhaul.connect`. If that starts a worker, the worker runs on the worker's core."""
        import backhaul

        before = set(descendants(os.getpid()))
        session = backhaul.connect(worker, **arguments)
        self._started.callback(session.close)
        for pid in set(descendants(os.getpid())) - before:
            pin(self.worker.number, pid)
            self.worker.pids.append(pid)
        return session

    def tcp_worker(self, *options: str) -> str:
        """Starts a worker that listens on TCP. Returns its address as "host:port"."""
        line = self.start([*MODULE, "backhaul", "worker", "--listen", "127.0.0.1:0", *options])[1]
        return line.rpartition(" ")[2]

    def start(
        self,
        command: Sequence[str],
        core: Core | None = None,
        environment: Mapping[str, str] | None = None,
        timeout_s: float = _START_S,
    ) -> tuple[ChildProcess, str]:
        """Starts a process on a core, the worker's by default.

        Args:
            command: The program to run and its arguments.
            core: The core; None for the worker's.
            environment: Variables that are added to the environment.
            timeout_s: Seconds within which the process must print a line.

        Returns:
            The process and its first line on stdout.

        Raises:
            ChildError: The process printed no line in time. It was ended.
        """
        core = core or self.worker
        with _inherited(core.number):
            process = ChildProcess(" ".join(command), command, environment=environment, ends_with_stdin=False)
        try:
            line = process.read(timeout_s)
        except ChildError:
            process.end()
            raise
        self._started.callback(process.end)
        core.pids += process.pids
        return process, line

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._started.close()


@contextmanager
def _inherited(core: int) -> Iterator[None]:
    """Makes processes that this thread starts run on another core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
