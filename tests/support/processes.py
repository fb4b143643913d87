"""Worker processes that tests start and end."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Self

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
        self.process = subprocess.Popen(
            [sys.executable, *program, "worker", "--listen", listen, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
        )
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline().strip()
        self.address = self.line.rpartition(" ")[2]
        self.pid = self.process.pid

    def telemetry(self, token: str = "") -> telemetry_pb2.GetTelemetryResponse:
        """The worker as it is now."""
        with grpc.insecure_channel(self.address) as channel:
            stub = telemetry_pb2_grpc.TelemetryServiceStub(channel)
            request = telemetry_pb2.GetTelemetryRequest()
            return stub.GetTelemetry(request, timeout=10, wait_for_ready=True, metadata=bearer(token))

    def end(self, timeout_s: float = 15) -> str:
        """SIGTERM; returns what it logged."""
        self.process.terminate()
        try:
            _, logged = self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
            raise
        return logged

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.process.poll() is None:
            self.end()
        for pipe in (self.process.stdout, self.process.stderr):
            _close(pipe)


def _close(pipe: IO[str] | None) -> None:
    if pipe is not None:
        pipe.close()


def open_files() -> int:
    """File descriptors of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))
