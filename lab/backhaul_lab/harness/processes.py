"""Processes of a measurement: started with pipes, read with timeouts, and ended with all of their children."""

import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from time import monotonic
from typing import IO

from backhaul_lab.harness.core_times import children_ran_s, process_ran_s

WITH_ITS_PARENT = ("setpriv", "--pdeathsig", "KILL")
"""What a command begins with that ends when the process that started it does."""
MODULE = (sys.executable, "-P", "-m")
"""What a command begins with that runs a module."""
_LAST_LINES, _LAST_BYTES, _END_S = 25, 20_000, 10.0


class ChildError(RuntimeError):
    """A process did not come up, or ended.

    Args:
        message: What happened to the process.
        log: The last lines of the process' log.
    """

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(message)
        self.log = log


class ChildProcess:
    """A process that ends with this process, however that ends.

    Args:
        name: Name of the process in messages.
        command: The program and its arguments.
        log: File to which the process writes its standard error; None for that of this process.
        environment: Variables that are added to the environment.
        ends_with_stdin: Whether the process ends by itself, in order, when its stdin is closed.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path | None = None,
        environment: Mapping[str, str] | None = None,
        *,
        ends_with_stdin: bool = True,
    ) -> None:
        self.name = name
        self._ends_with_stdin = ends_with_stdin
        self._log = log
        self._buffer = b""
        self._is_asked = False
        with nullcontext() if log is None else log.open("ab") as errors:
            self._process = subprocess.Popen(
                [*(WITH_ITS_PARENT if shutil.which(WITH_ITS_PARENT[0]) else ()), *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, **(environment or {})},
                start_new_session=True,  # Ctrl-C reaches only this process, which then ends the others in order.
            )

    @property
    def pids(self) -> list[int]:
        """Ids of the process and of all processes that it has started."""
        return [self._process.pid, *descendants(self._process.pid)]

    def ran_s(self) -> float:
        """Returns the CPU seconds of the process and its children, also of those that have ended, as a killed one."""
        return sum((process_ran_s(pid) or 0.0) + children_ran_s(pid) for pid in self.pids)

    def write(self, line: str) -> None:
        """Writes a line to the process. Raises ChildError if it has ended."""
        try:
            _pipe(self._process.stdin).write(line.encode() + b"\n")
            _pipe(self._process.stdin).flush()
        except OSError:
            raise self.error("has ended") from None

    def read(self, timeout_s: float) -> str:
        """Returns the next line of the process. Raises ChildError if it ends, or prints none in time."""
        until_s = monotonic() + timeout_s
        output = _pipe(self._process.stdout)
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([output], [], [], max(0.0, until_s - monotonic()))
            if not ready:
                raise self.error(f"printed nothing within {timeout_s:g} s")
            data = os.read(output.fileno(), 1 << 16)
            if not data:
                raise self.error("has ended")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode()

    def send_signal(self, number: signal.Signals) -> None:
        """Sends a signal to the process, and to none that it has started."""
        self._process.send_signal(number)

    def kill_serving(self) -> None:
        """Kills the processes that this one has started, which it restarts if it is the parent of a worker."""
        for pid in descendants(self._process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def ask_to_end(self) -> None:
        """Asks the process to end in order, and does not wait for it."""
        if self._is_asked:
            return
        self._is_asked = True
        with suppress(OSError):
            _pipe(self._process.stdin).close()
        if not self._ends_with_stdin:
            self._process.terminate()

    def end(self) -> None:
        """Ends the process, by force if it does not end in time, and whatever it has left behind."""
        group = self._process.pid
        self.ask_to_end()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
        _pipe(self._process.stdout).close()

    def error(self, what: str) -> ChildError:
        """Returns an error that says what the process did, with the end of its log."""
        ended = ""
        if what == "has ended":
            with suppress(subprocess.TimeoutExpired):  # its pipes are closed before it can be waited for
                ended = f" with code {self._process.wait(_END_S)}"
        return ChildError(f"{self.name} {what}{ended}", "" if self._log is None else end_of(self._log))


def interrupt_on_sigterm() -> None:
    """Makes SIGTERM raise KeyboardInterrupt, so that the processes that were started are ended."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)


def answers_only() -> IO[str]:
    """Returns standard output for the answers of this process. All else that is written to it goes to standard error.

    So what libraries, children and a model of the user's own print is not taken for an answer.
    """
    output, sys.stdout = os.fdopen(os.dup(1), "w"), sys.stderr
    os.dup2(2, 1)
    return output


def descendants(pid: int) -> list[int]:
    """Returns the ids of all processes that a process has started directly or indirectly."""
    pids: list[int] = []
    with suppress(OSError):  # The process has just ended.
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (thread / "children").read_text().split()):
                pids += [child, *descendants(child)]
    return pids


def end_of(log: Path) -> str:
    """Returns the last lines of a log, which may be huge or no text, as text that pages and terminals can show."""
    with suppress(OSError), log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _LAST_BYTES))
        lines = file.read().decode(errors="replace").splitlines()[-_LAST_LINES:]
        return "\n".join("".join(c if c.isprintable() else " " for c in line) for line in lines)
    return ""


def _pipe(pipe: "IO[bytes] | None") -> "IO[bytes]":
    assert pipe is not None
    return pipe
