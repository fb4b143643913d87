"""What the dashboard would have seen, without anything to see."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import cast

from backhaul_proto.v1 import telemetry_pb2
from backhaul_runtime.process.addresses import Address, parse_address
from backhaul_runtime.wire.telemetry import BOUNDS_S, bucket_of
from backhaul_server.dashboard.collect.event_log import EventLog
from backhaul_server.dashboard.collect.totals import Totals
from backhaul_server.dashboard.collect.watch import Watch

SUMS = Totals()._asdict()


@dataclass
class FakeWorker:
    """See `Watched`."""

    name: str = "a:1"
    state: str = "serving"
    telemetry: telemetry_pb2.GetTelemetryResponse | None = None

    @property
    def address(self) -> Address:
        return parse_address(self.name)


class FakeTrainers:
    """See `Trainers`."""

    def __init__(self, *, dropped: int = 0, saved_bytes: int = 0, running: int = 0, **sums: float) -> None:
        self.dropped, self.saved_bytes, self.running = dropped, saved_bytes, running
        self.totals = SimpleNamespace(**{**SUMS, **sums})


@dataclass
class FakeWatch:
    """See `Watch`."""

    workers: list[FakeWorker] = field(default_factory=list)
    trainers: FakeTrainers = field(default_factory=FakeTrainers)
    events: EventLog = field(default_factory=EventLog)

    @property
    def as_watch(self) -> Watch:
        """This fake, for what reads a watch."""
        return cast(Watch, self)


def telemetry_of(
    *sessions: telemetry_pb2.SessionTelemetry, durations_s: tuple[float, ...] = (0.003, 0.2), errors: int = 1
) -> telemetry_pb2.GetTelemetryResponse:
    """A worker's answer."""
    buckets = [0] * (len(BOUNDS_S) + 1)
    for duration_s in durations_s:
        buckets[bucket_of(duration_s)] += 1
    return telemetry_pb2.GetTelemetryResponse(
        worker_version="0.1.0",
        epoch="epoch-secret",
        device="cpu",
        uptime_s=12,
        fingerprint={"torch": "2.13.0"},
        memory=telemetry_pb2.MemoryTelemetry(
            budget_bytes=1000,
            segment_bytes=400,
            cached_bytes=300,
            working_bytes=20,
            result_bytes=10,
            resident_bytes=5000,
            refusals=3,
            evictions=4,
            reserve_bytes=50,
        ),
        sessions=sessions,
        rpcs=[
            telemetry_pb2.RpcTelemetry(
                method="Backward", calls=len(durations_s), errors=errors, total_s=sum(durations_s), buckets=buckets
            )
        ],
        recomputed_segments=7,
        received_bytes=8,
        sent_bytes=9,
        queued_requests=2,
        busy_s=6.5,
        spared_bytes=11,
        accelerator=telemetry_pb2.Accelerator(name="GPU", utilization=0.5, used_bytes=600, total_bytes=800),
    )
