"""Asks workers how they are, once a second, and remembers the last minutes."""

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc

from backhaul_proto.v1 import telemetry_pb2, telemetry_pb2_grpc
from backhaul_runtime.addresses import Address
from backhaul_runtime.credentials import bearer
from backhaul_runtime.protocol import CHANNEL_OPTIONS

INTERVAL_S = 1.0
ANSWER_S = 2.0
KEPT_SAMPLES = 600
"""Ten minutes."""


@dataclass(frozen=True, slots=True)
class MemorySample:
    """A worker's memory at a moment.

    Attributes:
        at_s: Seconds since 1970.
        segments: Bytes of tensors that live segments name.
        cached: Bytes kept for later.
        working: Bytes of replays ahead of or under a request.
        results: Bytes of finished results.
    """

    at_s: float
    segments: int
    cached: int
    working: int
    results: int


@dataclass
class Watched:
    """A worker as it was last seen.

    Attributes:
        address: As given on the command line.
        telemetry: Its last answer, None before the first.
        answered_at_s: When that came, in seconds since 1970; 0 before.
        error: Why it did not answer since, empty while it does.
        memory: The last ten minutes.
    """

    address: Address
    telemetry: telemetry_pb2.GetTelemetryResponse | None = None
    answered_at_s: float = 0.0
    error: str = "not asked yet"
    memory: deque[MemorySample] = field(default_factory=lambda: deque(maxlen=KEPT_SAMPLES))

    @property
    def state(self) -> str:
        """One of "serving", "draining" and "unreachable"."""
        if self.error or self.telemetry is None:
            return "unreachable"
        return "draining" if self.telemetry.draining else "serving"

    def answered(self, telemetry: telemetry_pb2.GetTelemetryResponse) -> None:
        """Takes an answer in."""
        self.telemetry, self.answered_at_s, self.error = telemetry, time.time(), ""
        memory = telemetry.memory
        self.memory.append(
            MemorySample(
                self.answered_at_s,
                memory.segment_bytes,
                memory.cached_bytes,
                memory.working_bytes,
                memory.result_bytes,
            )
        )


class Watch:
    """All workers. `run` it as a task; it ends by cancellation."""

    def __init__(self, addresses: Sequence[Address], tokens: Sequence[str | None] = (None,)) -> None:
        self.workers = [Watched(address) for address in addresses]
        self._tokens = list(tokens) * (len(addresses) if len(tokens) == 1 else 1)

    async def run(self) -> None:
        """Asks each worker once a second. One that does not answer delays no other."""
        await asyncio.gather(*map(self._follow, self.workers, self._tokens))

    async def _follow(self, worker: Watched, token: str | None) -> None:
        async with grpc.aio.insecure_channel(worker.address.target, options=CHANNEL_OPTIONS) as channel:
            stub = telemetry_pb2_grpc.TelemetryServiceStub(channel)
            while True:
                try:
                    request = telemetry_pb2.GetTelemetryRequest()
                    worker.answered(await stub.GetTelemetry(request, timeout=ANSWER_S, metadata=bearer(token)))
                except grpc.aio.AioRpcError as error:
                    worker.error = f"{error.code().name}: {error.details()}"
                await asyncio.sleep(INTERVAL_S)
