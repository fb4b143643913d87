"""Forks programs from a process that has imported all that they need: an import of torch is most of a program's start.

Run as a program, this module reads requests from the Unix socket that is its standard input. Each is the command line
and the environment of a command, with three files: its standard output and error, and a socket on which its process id
is told, and at its end its exit code. When the first socket is closed this process ends, and the commands with it.
"""

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import IO, Any, NamedTuple

_REQUEST_BYTES = 1 << 18
_PYTHON = sys.executable
_AUDITED = {
    "compile",
    "ctypes.dlopen",
    "exec",
    "import",
    "marshal.loads",
    "os.exec",
    "os.fork",
    "os.posix_spawn",
    "os.system",
    "pickle.find_class",
    "subprocess.Popen",
}
"""Events by which data could become code. A command notes its own in the file that AUDIT_FILE names, if it is set."""


class Nursery(NamedTuple):
    """The process that forks commands.

    Attributes:
        requests: The socket that it reads requests from.
        pid: Its process id.
    """

    requests: socket.socket
    pid: int


class ForkedCommand:
    """A `backhaul` command or a program in Python, with what tests use of `subprocess.Popen`.

    Args:
        arguments: What follows `backhaul` on the command line. After "-c": the code of a program and its arguments.
        stderr: Where its log goes.
        stdout: Where its output goes; None for a pipe.
        environment: Variables to start it with; None for this process's own.

    Attributes:
        stdout: The end of the pipe that its output comes from; None if it goes to a file.
        stderr: None, as its log goes to a file, unlike that of a `subprocess.Popen` in its place.
        pid: Its process id.
        returncode: Its exit code, negative for a signal; None before its end was noticed.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        stderr: IO[str],
        stdout: IO[str] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        # Its id and its exit code are messages of their own, however soon the second one follows.
        self._status, nursery_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        read, written = os.pipe() if stdout is None else (-1, os.dup(stdout.fileno()))
        request = json.dumps([arguments, dict(os.environ if environment is None else environment)]).encode()
        with nursery_end:
            socket.send_fds(nursery().requests, [request], [written, stderr.fileno(), nursery_end.fileno()])
        os.close(written)
        self.stdout = os.fdopen(read) if stdout is None else None
        self.stderr: IO[str] | None = None
        self.pid = int(self._status.recv(32))
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Returns the exit code, which is negative for a signal. Raises TimeoutExpired."""
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("backhaul", timeout or 0)
            self.returncode = int(self._status.recv(32))
            self._status.close()
        return self.returncode

    def poll(self) -> int | None:
        """Returns the exit code, None before the end."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """Waits for the end. Returns what came on standard output since it was read."""
        self.wait(timeout)
        assert self.stdout is not None
        return self.stdout.read(), None

    def send_signal(self, number: int) -> None:
        """Sends a signal, unless the command has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has ended, and the nursery is about to say so
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Sends SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Sends SIGKILL."""
        self.send_signal(signal.SIGKILL)


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a `backhaul` command to its end, with variables besides this process's own.

    A worker runs without a supervisor, which would start a Python that imports torch.
    """
    if arguments[0] == "worker":
        arguments = (*arguments, "--supervisor", str(nursery().pid))
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as log:
        command = ForkedCommand(arguments, log, output, {**os.environ, **environment})
        try:
            code = command.wait(60)
        finally:
            command.kill()
        written = [os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode() for file in (output, log)]
        return subprocess.CompletedProcess(("backhaul", *arguments), code, *written)


class ForkingSubprocess:
    """What `connect()` needs of the module `subprocess`. The worker that it starts is forked."""

    DEVNULL, PIPE, TimeoutExpired = subprocess.DEVNULL, subprocess.PIPE, subprocess.TimeoutExpired

    @staticmethod
    def Popen(command: Sequence[str], *, env: Mapping[str, str], **_: Any) -> "ForkedCommand":  # noqa: N802  its name there
        """Starts the worker. Raises OSError for another Python than this one."""
        if command[0] != _PYTHON:
            raise OSError("only this Python can be forked")
        arguments = list(command[command.index("backhaul") + 1 :])
        arguments[arguments.index("--parent") + 1] = str(nursery().pid)
        read, written = os.pipe()
        with os.fdopen(written, "w") as log:
            forked = ForkedCommand(arguments, log, environment=env)
        forked.stderr = os.fdopen(read)
        return forked


@cache
def nursery() -> Nursery:
    """Returns this process's nursery, which is started at the first call."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen([sys.executable, __file__], stdin=theirs.fileno(), start_new_session=True)

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return Nursery(ours, process.pid)


def _audit(path: str) -> None:
    """Notes the events of this process in a file, each with its time."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(event: str, arguments: tuple[object, ...]) -> None:
        if event in _AUDITED:
            os.write(file, f"{time.monotonic()} {event} {str(arguments)[:200]!r}\n".encode())

    sys.addaudithook(note)


def _run_program(code: str, *arguments: str) -> int:
    """Runs a program as `python -c` does."""
    sys.argv = ["-c", *arguments]
    exec(code, {"__name__": "__main__"})
    return 0


def _serve() -> int:
    """Forks commands on request, until the tests' end. Returns the exit code, in each command its own."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # as `backhaul worker` does before it imports torch

    # What is imported here needs no import in a command. Torch imports the first with the first backward.
    import torch.fx.experimental.symbolic_shapes  # noqa: F401

    import backhaul_server.dashboard.history.writer
    import backhaul_server.dashboard.http.app
    import backhaul_server.worker.main  # noqa: F401
    from backhaul._cli.main import main
    from backhaul._cli.registry import build

    build()
    requests = socket.socket(fileno=0)
    poll = select.poll()
    poll.register(requests, select.POLLIN)
    commands: dict[int, tuple[int, socket.socket]] = {}  # by their pidfd
    while True:
        for number, _ in poll.poll():
            if number in commands:
                pid, status = commands.pop(number)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with suppress(OSError), status:  # the test may not want to know
                    status.send(str(code).encode())
                poll.unregister(number)
                os.close(number)
                continue
            request, files, _, _ = socket.recv_fds(requests, _REQUEST_BYTES, 3)
            if not request:
                for pid, _ in commands.values():
                    os.kill(pid, signal.SIGTERM)
                return 0
            if (pid := os.fork()) == 0:
                arguments, environment = json.loads(request)
                os.setsid()
                for target, file in enumerate([os.open(os.devnull, os.O_RDONLY), *files[:2]]):
                    os.dup2(file, target)
                for file in files:
                    os.close(file)
                os.environ.clear()
                os.environ.update(environment)
                sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
                if "AUDIT_FILE" in environment:
                    _audit(environment["AUDIT_FILE"])
                try:
                    code = _run_program(*arguments[1:]) if arguments[0] == "-c" else main(arguments)
                except SystemExit as end:  # of argparse
                    code = int(end.code or 0)
                atexit._run_exitfuncs()
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)  # the interpreter's end would copy all memory that it shares with this process
            for file in files[:2]:
                os.close(file)
            status = socket.socket(fileno=files[2])
            status.send(str(pid).encode())
            pidfd = os.pidfd_open(pid)
            commands[pidfd] = pid, status
            poll.register(pidfd, select.POLLIN)


if __name__ == "__main__":
    sys.exit(_serve())
