"""A worker as it was last seen, and its last hour."""

import time
from collections import deque
from dataclasses import dataclass
from typing import Literal

from backhaul_proto.v1 import telemetry_pb2
from backhaul_runtime.process.addresses import Address
from backhaul_server.dashboard.collect.durations import Durations, Tally
from backhaul_server.dashboard.collect.sanitize import clean_telemetry, clipped
from backhaul_server.dashboard.collect.series import Series

KEPT_S = 3_600
SEEN_S = 3.0
"""A worker not heard of for so long is not healthy, whatever it said."""
TIERS = ("segment_bytes", "cached_bytes", "working_bytes", "result_bytes")
_MARKS = 600

State = Literal["serving", "draining", "unreachable"]


@dataclass(frozen=True, slots=True)
class CounterIncrease:
    """That a worker gave something up or turned something away.

    Attributes:
        at_s: When it was seen, in seconds since 1970.
        kind: Whether something was evicted or refused.
        count: How often since it was last asked.
    """

    at_s: float
    kind: Literal["eviction", "refusal"]
    count: int


class Watched:
    """One worker.

    Args:
        address: As given on the command line.
        of_all: Where its calls are counted beside those of others.

    Attributes:
        address: As given on the command line.
        telemetry: Its last answer without reports, None before the first.
        answered_at_s: When that came, in seconds since 1970; 0 before.
        error: Why it did not answer since, empty while it does.
        was_asked: Whether it was asked once, and answered or didn't.
        memory: Bytes by tier, in the order of TIERS.
        increases: The last evictions and refusals.
        durations: The durations of this worker's calls.
        after_report: The last report that was taken from it.
        caught_up_at_s: When it last had no more reports to give; 0 before.
    """

    def __init__(self, address: Address, of_all: Tally) -> None:
        self.address = address
        self.telemetry: telemetry_pb2.GetTelemetryResponse | None = None
        self.answered_at_s = 0.0
        self.error = "not asked yet"
        self.was_asked = False
        self.memory = Series(KEPT_S, len(TIERS))
        self.increases: deque[CounterIncrease] = deque(maxlen=_MARKS)
        self.durations = Durations(of_all)
        self.after_report = 0
        self.caught_up_at_s = 0.0

    @property
    def epoch(self) -> str:
        """Of its last answer."""
        return self.telemetry.epoch if self.telemetry is not None else ""

    @property
    def state(self) -> State:
        """The state according to its last answer; "unreachable" if it does not answer."""
        if self.error or self.telemetry is None:
            return "unreachable"
        return "draining" if self.telemetry.draining else "serving"

    @property
    def budget_bytes(self) -> int:
        """Of its memory, 0 where it is not known."""
        return self.telemetry.memory.budget_bytes if self.telemetry is not None else 0

    def is_healthy(self, now_s: float) -> bool:
        """Whether it serves, and said so a moment ago."""
        return self.state == "serving" and now_s - self.answered_at_s <= SEEN_S

    def sessions(self) -> list[telemetry_pb2.SessionTelemetry]:
        """Those that are open as far as is known: none while it does not answer."""
        return list(self.telemetry.sessions) if self.telemetry is not None and not self.error else []

    def failed(self, error: str) -> None:
        """It did not answer."""
        self.was_asked, self.error = True, clipped(error, 300)

    def answered(self, telemetry: telemetry_pb2.GetTelemetryResponse) -> None:
        """Takes in an answer whose reports were taken out."""
        clean_telemetry(telemetry)
        now_s, memory, before = time.time(), telemetry.memory, self.telemetry
        if before is not None:
            same = before.memory if before.epoch == telemetry.epoch else telemetry_pb2.MemoryTelemetry()
            self._grew(now_s, "eviction", memory.evictions - same.evictions)
            self._grew(now_s, "refusal", memory.refusals - same.refusals)
            if before.epoch != telemetry.epoch:
                self.durations.restarted()
        self.memory.append(now_s, [getattr(memory, tier) for tier in TIERS])
        self.durations.take(now_s, telemetry.rpcs)
        self.telemetry, self.answered_at_s, self.error, self.was_asked = telemetry, now_s, "", True

    def _grew(self, at_s: float, kind: Literal["eviction", "refusal"], count: int) -> None:
        if count > 0:
            self.increases.append(CounterIncrease(at_s, kind, count))
