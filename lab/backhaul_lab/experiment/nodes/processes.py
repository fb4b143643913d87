"""A process of a node: started with pipes and a log, read with timeouts, and ended with all of its children."""

import os
import select
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import IO

from backhaul_lab.bench.noise import process_ran_s
from backhaul_lab.bench.stage import descendants
from backhaul_lab.experiment.nodes.network import WITH_ITS_PARENT

_LAST_LINES, _LAST_BYTES, _END_S = 25, 20_000, 10.0
_CHILDREN_TICKS = slice(13, 15)
"""Fields cutime and cstime of /proc/PID/stat, counted from the one after the name."""


class NodeError(Exception):
    """A node did not come up, or ended.

    Args:
        message: What happened to the node.
        log: The last lines of the node's log.
    """

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(message)
        self.log = log


class NodeProcess:
    """A process of a node. It ends with this process, however that ends.

    Args:
        name: Name of the node in messages.
        command: The program and its arguments.
        log: File to which the process writes its standard error.
        environment: Variables that are added to the environment.
        ends_with_stdin: Whether the process ends by itself, in order, when its stdin is closed.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        environment: Mapping[str, str] | None = None,
        *,
        ends_with_stdin: bool = True,
    ) -> None:
        self.name = name
        self._ends_with_stdin = ends_with_stdin
        self._log = log
        self._buffer = b""
        self._is_asked = False
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [*(WITH_ITS_PARENT if shutil.which(WITH_ITS_PARENT[0]) else ()), *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, **(environment or {})},
                start_new_session=True,  # Ctrl-C reaches only the runner, which then ends its nodes in order.
            )

    @property
    def pids(self) -> list[int]:
        """Ids of the process and of all processes that it has started."""
        return [self._process.pid, *descendants(self._process.pid)]

    def ran_s(self) -> float:
        """Returns the CPU seconds of the node's processes, also of those that have ended, as a killed one."""
        return sum((process_ran_s(pid) or 0.0) + _children_ran_s(pid) for pid in self.pids)

    def write(self, line: str) -> None:
        """Writes a line to the process. Raises NodeError if it has ended."""
        try:
            _pipe(self._process.stdin).write(line.encode() + b"\n")
            _pipe(self._process.stdin).flush()
        except OSError:
            raise self.error("has ended") from None

    def read(self, timeout_s: float) -> str:
        """Returns the next line of the process. Raises NodeError if it ends, or prints none in time."""
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

    def error(self, what: str) -> NodeError:
        """Returns an error that says what the process did, with the end of its log."""
        ended = ""
        if what == "has ended":
            with suppress(subprocess.TimeoutExpired):  # its pipes are closed before it can be waited for
                ended = f" with code {self._process.wait(_END_S)}"
        return NodeError(f"{self.name} {what}{ended}", end_of(self._log))


def end_of(log: Path) -> str:
    """Returns the last lines of a log, which may be huge or no text, as text that pages and terminals can show."""
    with suppress(OSError), log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _LAST_BYTES))
        lines = file.read().decode(errors="replace").splitlines()[-_LAST_LINES:]
        return "\n".join("".join(c if c.isprintable() else " " for c in line) for line in lines)
    return ""


def _children_ran_s(pid: int) -> float:
    """Returns the CPU seconds of the ended children of a process that it has waited for, and of their children."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has just ended, or this is not Linux
        return 0.0
    return sum(map(int, fields[_CHILDREN_TICKS])) / os.sysconf("SC_CLK_TCK")


def _pipe(pipe: "IO[bytes] | None") -> "IO[bytes]":
    assert pipe is not None
    return pipe
