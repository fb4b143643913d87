"""A worker, as of its last answer, with the history of its last hour."""

import time
from collections import deque
from typing import Literal

from backhaul_proto.v1 import telemetry_pb2
from backhaul_runtime.process.addresses import Address
from backhaul_runtime.wire.clock import ClockOffset
from backhaul_server.dashboard.collect.durations import Durations, Tally
from backhaul_server.dashboard.collect.event_log import Burst, EventLog
from backhaul_server.dashboard.collect.sanitize import clean, clipped
from backhaul_server.dashboard.collect.series import Series
from backhaul_server.dashboard.schemas.events import EventEntry, Kind
from backhaul_server.dashboard.schemas.memory import MemoryEvent
from backhaul_server.dashboard.schemas.now import State

RETENTION_S = 3_600
TIERS = ("segment_bytes", "cached_bytes", "working_bytes", "result_bytes")
NOTED_AFTER = 2
"""Polls in a row without an answer after which a worker counts as out of reach. One may be late on a busy machine, and
a worker that restarts misses one."""
_MARKS = 600


class Watched:
    """One watched worker.

    Args:
        address: The address, as given on the command line.
        of_all: A tally that counts the calls of all workers together.
        events: Gets what happens to the worker.

    Attributes:
        address: The address, as given on the command line.
        telemetry: The last answer without its reports; None before the first.
        answered_at_s: When the last answer came, in seconds since 1970; 0 before the first.
        error: Why the worker has not answered since; empty while it answers.
        was_asked: Whether the worker has answered, or missed as many polls in a row as the event log notes.
        memory: Bytes by tier over time, in the order of TIERS.
        load: The share of the time in which the worker computed, since the sample before, from 0 to 1.
        clock: The comparison of the worker's clock with this process's.
        increases: The last evictions and refusals.
        durations: The durations of this worker's calls.
        after_report: Number of the last report that was taken from the worker.
        caught_up_at_s: When the worker last had no further reports, in seconds since 1970; 0 before.
    """

    def __init__(self, address: Address, of_all: Tally, events: EventLog | None = None) -> None:
        self.address = address
        self._events = events if events is not None else EventLog()
        self._bursts: dict[Kind, Burst] = {"evictions": Burst(), "refusals": Burst()}
        self.telemetry: telemetry_pb2.GetTelemetryResponse | None = None
        self.answered_at_s = 0.0
        self.error = "not asked yet"
        self.was_asked = False
        self._missed = 0  # polls in a row without an answer
        self.memory = Series(RETENTION_S, len(TIERS))
        self.load = Series(RETENTION_S, 1)
        self.clock = ClockOffset()
        self.increases: deque[MemoryEvent] = deque(maxlen=_MARKS)
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

    def sessions(self) -> list[telemetry_pb2.SessionTelemetry]:
        """Returns the open sessions as of the last answer; none while the worker does not answer."""
        return list(self.telemetry.sessions) if self.telemetry is not None and not self.error else []

    def failed(self, error: str) -> None:
        """Notes that the worker did not answer, and why, as the end of a sentence about the worker."""
        self._missed += 1
        if self._missed == NOTED_AFTER:
            does = "stopped answering" if self.answered_at_s else "does not answer"
            self._note(time.time(), "worker_unreachable", f"Worker {self.address.text} {does}: {clipped(error, 200)}")
        self.was_asked |= self._missed >= NOTED_AFTER
        self.error = clipped(error, 300)

    def answered(self, telemetry: telemetry_pb2.GetTelemetryResponse) -> None:
        """Processes an answer whose reports were removed."""
        clean(telemetry)
        now_s, memory, before = time.time(), telemetry.memory, self.telemetry
        if before is not None:
            same = before.memory if before.epoch == telemetry.epoch else telemetry_pb2.MemoryTelemetry()
            self._grew(now_s, "eviction", memory.evictions - same.evictions)
            self._grew(now_s, "refusal", memory.refusals - same.refusals)
            if before.epoch != telemetry.epoch:
                self.durations.restarted()
            self._sample_load(now_s, before, telemetry)
        self._note_changes(now_s, before, telemetry)
        self.memory.append(now_s, [getattr(memory, tier) for tier in TIERS])
        self.durations.take(now_s, telemetry.rpcs)
        self.telemetry, self.answered_at_s, self.error, self.was_asked = telemetry, now_s, "", True
        self._missed = 0

    def _grew(self, at_s: float, kind: Literal["eviction", "refusal"], count: int) -> None:
        if count > 0:
            self.increases.append(MemoryEvent(at_s=at_s, kind=kind, count=count))
        name: Kind = "evictions" if kind == "eviction" else "refusals"
        due = self._bursts[name].grew(at_s, max(0, count))
        if due:
            did = (
                f"evicted {due:,} cached tensors, replays or results"
                if kind == "eviction"
                else f"refused {due:,} requests, whose segments run on the trainers"
            )
            text = f"Worker {self.address.text} {did}, because memory was short"
            self._note(at_s, name, text, due)

    def _sample_load(
        self, now_s: float, before: telemetry_pb2.GetTelemetryResponse, telemetry: telemetry_pb2.GetTelemetryResponse
    ) -> None:
        """Samples the load by the worker's own clock: its uptime says how much time has passed."""
        passed_s = telemetry.uptime_s - before.uptime_s
        # A worker without a clock in its answer is too old to tell how long it was busy.
        if before.epoch == telemetry.epoch and passed_s > 0 and telemetry.clock_s:
            self.load.append(now_s, (max(0.0, min(1.0, (telemetry.busy_s - before.busy_s) / passed_s)),))

    def _note_changes(
        self,
        now_s: float,
        before: telemetry_pb2.GetTelemetryResponse | None,
        telemetry: telemetry_pb2.GetTelemetryResponse,
    ) -> None:
        name = f"Worker {self.address.text}"
        if before is not None and before.epoch != telemetry.epoch:
            text = f"{name} was restarted. What it held for trainers is lost, and they recompute those segments"
            self._note(now_s, "worker_restarted", text)
        elif self._missed >= NOTED_AFTER:
            self._note(now_s, "worker_reachable", f"{name} answers{' again' if before is not None else ''}")
        if telemetry.draining and not (before is not None and before.draining):
            self._note(now_s, "worker_draining", f"{name} is shutting down and takes no new segments")

    def _note(self, at_s: float, kind: Kind, text: str, count: int = 1) -> None:
        # Two dashboards see the same change within a second of each other. Both entries are kept.
        name = f"{self.address.text}-{kind}-{1e3 * at_s:.0f}"
        self._events.add(EventEntry(id=name, at_s=at_s, kind=kind, worker=self.address.text, text=text, count=count))
