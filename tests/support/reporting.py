"""What trainers tell and workers answer, made up: for a dashboard of many workers and segments without any training."""

import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Self
from uuid import uuid4

import grpc

from backhaul_proto.v1 import telemetry_pb2
from backhaul_proto.v1.telemetry_pb2 import Lane
from backhaul_runtime.version import version
from backhaul_runtime.wire.telemetry import BOUNDS_S, bucket_of
from support.wire import serve

ANSWER_BYTES = 1 << 20


@dataclass
class Training:
    """A run as its trainer would tell of it: segments forward one after the other, then backward in reverse.

    Attributes:
        run: Its id.
        segments: Calls in a step.
        workers: That recompute; segment i is the i-th's, in turns.
        began_at_s: When step 0 began. Steps follow each other without a break.
        step_s: What a step takes.
        name: Of the segments.
        decision: Of the calls.
    """

    run: str = field(default_factory=lambda: uuid4().hex)
    segments: int = 4
    workers: Sequence[str] = ("127.0.0.1:50051",)
    began_at_s: float = field(default_factory=time.time)
    step_s: float = 0.4
    name: str = "Block"
    decision: str = "gradients"

    def about(self, *, is_closed: bool = False) -> telemetry_pb2.Run:
        """The run itself."""
        return telemetry_pb2.Run(
            id=self.run,
            trainer="gpu-box:4711",
            client_version=version(),
            started_at_s=self.began_at_s,
            settings={"returns": "auto", "numerics": "auto"},
            fingerprint={"torch": "2.13.0", "device": "cpu"},
            workers=self.workers,
            is_closed=is_closed,
        )

    def report(self, steps: Iterable[int] = (0,), *, is_closed: bool = False) -> telemetry_pb2.TrainerReport:
        """Of those steps, with all of their calls."""
        step_numbers = list(steps)
        return telemetry_pb2.TrainerReport(
            run=self.about(is_closed=is_closed),
            steps=[self.step(number) for number in step_numbers],
            calls=[self.call(step, number) for step in step_numbers for number in range(self.segments)],
            drift=0.0,
        )

    def step(self, number: int, **changed: Any) -> telemetry_pb2.Step:
        """One step. Its loss falls."""
        fields: dict[str, Any] = {
            "number": number,
            "started_at_s": self.began_at_s + number * self.step_s,
            "duration_s": self.step_s,
            "loss": 2 + 3 / (1 + number),
            "calls": self.segments,
            "gradients" if self.decision == "gradients" else "on_trainer": self.segments,
            "wait_s": 0.1 * self.step_s,
            "overhead_s": 0.02 * self.step_s,
            "spared_s": 0.3 * self.step_s,
            "up_bytes": 5_000_000 * self.segments,
            "down_bytes": 4_000_000 * self.segments,
            "saved_bytes": 30_000_000 * self.segments,
            "peak_saved_bytes": 31_000_000 * self.segments,
            "peak_bytes": 700_000_000,
        }
        return telemetry_pb2.Step(**(fields | changed))

    def call(self, step: int, number: int, **changed: Any) -> telemetry_pb2.SegmentCall:
        """One call: a third of the step is forward, two thirds are backward."""
        began_s = self.began_at_s + step * self.step_s
        forward_s = self.step_s / 3 / self.segments
        backward_s = began_s + self.step_s / 3 + (self.segments - 1 - number) * 2 * forward_s
        spans = [
            (Lane.LANE_FORWARD, began_s + number * forward_s, 0.9 * forward_s),
            (Lane.LANE_UPLOAD, began_s + (number + 0.9) * forward_s, 0.4 * forward_s),
            (Lane.LANE_QUEUE, backward_s - 1.2 * forward_s, 0.2 * forward_s),
            (Lane.LANE_RECOMPUTE, backward_s - forward_s, 0.9 * forward_s),
            (Lane.LANE_BACKWARD, backward_s - 0.1 * forward_s, 1.3 * forward_s),
            (Lane.LANE_DOWNLOAD, backward_s + 1.2 * forward_s, 0.3 * forward_s),
            (Lane.LANE_WAIT, backward_s + 1.0 * forward_s, 0.5 * forward_s),
        ]
        fields: dict[str, Any] = {
            "step": step,
            "number": number,
            "name": self.name,
            "position": number,
            "worker": self.workers[number % len(self.workers)],
            "decision": self.decision,
            "reason": "no output is used elsewhere" if self.decision == "gradients" else "the worker was gone",
            "spans": [telemetry_pb2.Span(lane=lane, started_at_s=at, duration_s=took) for lane, at, took in spans],
            "up_bytes": 5_000_000,
            "down_bytes": 4_000_000,
            "overhead_s": 0.02 * forward_s,
        }
        return telemetry_pb2.SegmentCall(**(fields | changed))


class FakeWorker:
    """A worker that has nothing but telemetry, on any free port. It listens when constructed; a context manager.

    Args:
        token: That it demands, if any.

    Attributes:
        address: Where it listens.
        telemetry: What it answers, without reports. Change it under `lock`.
        hung: Set, it answers nobody.
    """

    def __init__(self, token: str = "") -> None:
        self.lock = threading.Lock()
        self.hung = threading.Event()
        self._ended = threading.Event()
        self._token = token
        self._reports: list[telemetry_pb2.Report] = []
        self._next = 1
        self.telemetry = _telemetry()
        self._server = grpc.server(ThreadPoolExecutor(2), options=[("grpc.so_reuseport", 0)])
        serve(self._server, telemetry_pb2, self)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def tell(self, *reports: telemetry_pb2.TrainerReport) -> None:
        """Takes reports, for whoever asks."""
        with self.lock:
            for report in reports:
                self._reports.append(telemetry_pb2.Report(number=self._next, report=report))
                self._next += 1

    def served(self, method: str, durations_s: Sequence[float], errors: int = 0) -> None:
        """Counts calls."""
        with self.lock:
            known = next((rpc for rpc in self.telemetry.rpcs if rpc.method == method), None)
            rpc = known or self.telemetry.rpcs.add(method=method, buckets=[0] * (len(BOUNDS_S) + 1))
            rpc.calls += len(durations_s)
            rpc.errors += errors
            rpc.total_s += sum(durations_s)
            for duration_s in durations_s:
                rpc.buckets[bucket_of(duration_s)] += 1

    def restart(self) -> None:
        """It counts from 0 again, and forgot what it was told."""
        with self.lock:
            self.telemetry = _telemetry()
            self._reports.clear()
            self._next = 1

    def GetTelemetry(  # noqa: N802  gRPC's name
        self, request: telemetry_pb2.GetTelemetryRequest, context: Any
    ) -> telemetry_pb2.GetTelemetryResponse:
        if self._token and ("authorization", f"Bearer {self._token}") not in context.invocation_metadata():
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "a token is required")
        while self.hung.is_set() and not self._ended.is_set() and context.is_active():
            self._ended.wait(0.05)
        with self.lock:
            answer = telemetry_pb2.GetTelemetryResponse()
            answer.CopyFrom(self.telemetry)
            after = request.after_report if request.epoch == answer.epoch else 0
            size = 0
            for report in self._reports:
                if report.number <= after:
                    continue
                if answer.reports and size + report.ByteSize() > ANSWER_BYTES:
                    answer.has_more_reports = True
                    break
                answer.reports.append(report)
                size += report.ByteSize()
            return answer

    def close(self) -> None:
        """Ends it at once."""
        self._ended.set()
        self._server.stop(None).wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _telemetry() -> telemetry_pb2.GetTelemetryResponse:
    return telemetry_pb2.GetTelemetryResponse(
        worker_version=version(),
        epoch=uuid4().hex,
        device="cpu",
        uptime_s=3_600,
        memory=telemetry_pb2.MemoryTelemetry(budget_bytes=4 << 30, resident_bytes=600 << 20),
        fingerprint={"torch": "2.13.0", "device": "cpu"},
    )
