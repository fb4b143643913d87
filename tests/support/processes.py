"""Worker processes that tests start and end."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import grpc

from backhaul_proto.v1 import telemetry_pb2, telemetry_pb2_grpc
from backhaul_runtime.credentials import bearer


class WorkerProcess:
    """`backhaul worker`, ready when constructed.

    Attributes:
        address: Where it listens.
        pid: Of the process.
    """

    def __init__(
        self,
        *options: str,
        listen: str = "127.0.0.1:0",
        environment: Mapping[str, str] | None = None,
        program: Sequence[str] = ("-m", "backhaul"),
    ) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  a pipe that nobody reads would fill
        self.process = subprocess.Popen(
            [sys.executable, *program, "worker", "--listen", listen, *options],
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, **(environment or {})},
        )
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline().strip()
        self.address = self.line.rpartition(" ")[2]
        self.pid = self.process.pid

    def telemetry(self, token: str = "") -> telemetry_pb2.GetTelemetryResponse:
        """The worker as it is now, with all reports that it holds."""
        with grpc.insecure_channel(self.address) as channel:
            stub = telemetry_pb2_grpc.TelemetryServiceStub(channel)
            request, reports = telemetry_pb2.GetTelemetryRequest(), []
            while True:
                answer = stub.GetTelemetry(request, timeout=10, wait_for_ready=True, metadata=bearer(token))
                reports += answer.reports
                if not answer.has_more_reports:
                    break
                request = telemetry_pb2.GetTelemetryRequest(epoch=answer.epoch, after_report=reports[-1].number)
            answer.ClearField("reports")
            answer.reports.extend(reports)
            return answer

    def end(self, timeout_s: float = 15) -> str:
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


def open_files() -> int:
    """File descriptors of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))
