"""Worker processes that tests start and end."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

import grpc

from backhaul_proto.v1 import telemetry_pb2
from backhaul_runtime.process.credentials import bearer
from support.devices import DEVICE
from support.nursery import ForkedCommand, nursery
from support.wire import Services

_COMMAND = ("-m", "backhaul")
_CODE = "-c"
_TAKEN_BY_FORKS = ("BACKHAUL_", "PYTHONPATH", "AUDIT_FILE")
_BEYOND_ALL_REPORTS = 2**64 - 1


class WorkerProcess:
    """`backhaul worker`, ready when constructed.

    Args:
        options: Those of the command. Without "--device" the worker runs on `DEVICE`.
        listen: The address to listen on.
        environment: Variables to start it with, besides this process's own. Others than `_TAKEN_BY_FORKS`
            are read when torch is imported, so a worker that gets any is not forked, which is slower.
        supervised: Start what a user starts, which is slower: a supervisor whose child serves. Else one process serves.
        program: What serves instead, given to Python.

    Attributes:
        address: Where it listens.
        process: What was started.
        pid: Of the process that serves: whose memory and files are looked at, and which is stopped.
    """

    def __init__(
        self,
        *options: str,
        listen: str = "127.0.0.1:0",
        environment: Mapping[str, str] | None = None,
        supervised: bool = False,
        program: Sequence[str] = _COMMAND,
    ) -> None:
        nursery()  # before a test counts files
        self._supervised = supervised
        self._epoch = ""
        options = "--listen", listen, *options, *(() if "--device" in options else ("--device", DEVICE))
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  a pipe that nobody reads would fill
        self.process: subprocess.Popen[str] | ForkedCommand
        variables = dict(environment or {})
        is_forked = all(name.startswith(_TAKEN_BY_FORKS) for name in variables)
        if is_forked and not supervised and (program == _COMMAND or program[0] == _CODE):
            code = () if program == _COMMAND else program
            forked = [*code, "worker", *options, "--supervisor", str(nursery().pid)]
            self.process = ForkedCommand(forked, self._log, environment={**os.environ, **variables})
        else:
            own = () if supervised else ("--supervisor", str(os.getpid()))
            self.process = subprocess.Popen(
                [sys.executable, *program, "worker", *options, *own],
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                env={**os.environ, **variables},
            )
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline().strip()
        self.address = self.line.rpartition(" ")[2]
        self.pid = self.serving() if supervised and self.line else self.process.pid

    def serving(self) -> int:
        """The process that serves now, another one once a supervisor has started one; 0 if there is none."""
        if not self._supervised:
            return self.process.pid if self.process.poll() is None else 0
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(children[0]) if children else 0

    def kill(self) -> None:
        """Ends it at once and for good, as if its machine was gone."""
        with suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGSTOP)  # or it would start another
            os.kill(self.pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        while self.pid != self.process.pid and is_running(self.pid):
            time.sleep(0.01)

    def telemetry(self, token: str = "") -> telemetry_pb2.GetTelemetryResponse:
        """The worker as it is now, without the reports that it holds: those of all earlier tests would be sent."""
        answer = self._ask(
            telemetry_pb2.GetTelemetryRequest(epoch=self._epoch, after_report=_BEYOND_ALL_REPORTS), token
        )
        self._epoch = answer.epoch
        answer.ClearField("reports")  # a worker that has just started sends them
        return answer

    def reports(self, token: str = "") -> list[telemetry_pb2.Report]:
        """All reports that it holds."""
        request, reports = telemetry_pb2.GetTelemetryRequest(), list[telemetry_pb2.Report]()
        while True:
            answer = self._ask(request, token)
            reports += answer.reports
            if not answer.has_more_reports:
                return reports
            request = telemetry_pb2.GetTelemetryRequest(epoch=answer.epoch, after_report=reports[-1].number)

    def _ask(self, request: telemetry_pb2.GetTelemetryRequest, token: str) -> telemetry_pb2.GetTelemetryResponse:
        with grpc.insecure_channel(self.address) as channel:
            services = Services(channel)
            return services.telemetry.GetTelemetry(request, timeout=60, wait_for_ready=True, metadata=bearer(token))

    def end(self, timeout_s: float = 60) -> str:
        """SIGTERM; returns what it logged."""
        self.process.terminate()
        try:
            self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
            raise
        return self.logged()

    def logged(self) -> str:
        """What it wrote to stderr so far."""
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), size, 0).decode()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.process.poll() is None:
            self.end()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._log.close()


def in_order(first: WorkerProcess, second: WorkerProcess) -> str:
    """Addresses of two workers under which the first gets the first run of segments: workers are sorted by address."""
    return f"{first.address},localhost:{second.address.rpartition(':')[2]}"


def is_running(pid: int) -> bool:
    """Whether there is such a process that has not ended. One that nobody has reaped yet has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def open_files() -> int:
    """File descriptors of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))
