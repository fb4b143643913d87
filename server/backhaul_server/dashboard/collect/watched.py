"""A worker, as of its last answer, with the history of its last hour."""

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
"""Seconds without an answer after which a worker is not healthy, whatever state it last reported."""
TIERS = ("segment_bytes", "cached_bytes", "working_bytes", "result_bytes")
_MARKS = 600

State = Literal["serving", "draining", "unreachable"]


@dataclass(frozen=True, slots=True)
class CounterIncrease:
    """Evictions or refusals of a worker between two answers.

    Attributes:
        at_s: When the increase was seen, in seconds since 1970.
        kind: Whether something was evicted or refused.
        count: The increase since the answer before.
    """

    at_s: float
    kind: Literal["eviction", "refusal"]
    count: int


class Watched:
    """One watched worker.

    Args:
        address: The address, as given on the command line.
        of_all: A tally that counts the calls of all workers together.

    Attributes:
        address: The address, as given on the command line.
        telemetry: The last answer without its reports; None before the first.
        answered_at_s: When the last answer came, in seconds since 1970; 0 before the first.
        error: Why the worker has not answered since; empty while it answers.
        was_asked: Whether the worker has answered or failed at least once.
        memory: Bytes by tier over time, in the order of TIERS.
        increases: The last evictions and refusals.
        durations: The durations of this worker's calls.
        after_report: Number of the last report that was taken from the worker.
        caught_up_at_s: When the worker last had no further reports, in seconds since 1970; 0 before.
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
        """The epoch in the last answer; empty before the first."""
        return self.telemetry.epoch if self.telemetry is not None else ""

    @property
    def state(self) -> State:
        """The state according to its last answer; "unreachable" if it does not answer."""
        if self.error or self.telemetry is None:
            return "unreachable"
        return "draining" if self.telemetry.draining else "serving"

    @property
    def budget_bytes(self) -> int:
        """The budget of the worker in bytes; 0 if it is unknown."""
        return self.telemetry.memory.budget_bytes if self.telemetry is not None else 0

    def is_healthy(self, now_s: float) -> bool:
        """Whether the worker serves, and has answered recently."""
        return self.state == "serving" and now_s - self.answered_at_s <= SEEN_S

    def sessions(self) -> list[telemetry_pb2.SessionTelemetry]:
        """Returns the open sessions as of the last answer; none while the worker does not answer."""
        return list(self.telemetry.sessions) if self.telemetry is not None and not self.error else []

    def failed(self, error: str) -> None:
        """Notes that the worker did not answer, and why."""
        self.was_asked, self.error = True, clipped(error, 300)

    def answered(self, telemetry: telemetry_pb2.GetTelemetryResponse) -> None:
        """Processes an answer whose reports were removed."""
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
