"""The connection between a trainer and one worker: traffic over the last moments, round trip and clocks."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import inf

from backhaul_proto.v1 import telemetry_pb2
from backhaul_server.dashboard.collect.series import Series

RATE_S = 10.0
"""Seconds over which rates are averaged."""
LINKS = 256
"""The most links of one run."""
_SAMPLES = 64


@dataclass(slots=True)
class LinkRecord:
    """One link, as its trainer reported it.

    Attributes:
        last: The link as its trainer reported it last.
        heard_at_s: When it arrived, by this process's clock.
        traffic: The bytes sent and received since the run began, over time by the trainer's clock.
    """

    last: telemetry_pb2.Link
    heard_at_s: float = 0.0
    traffic: Series = field(default_factory=lambda: Series(_SAMPLES, 2))

    @property
    def clock(self) -> telemetry_pb2.Link | None:
        """The last report if it compares both clocks; None before the trainer has measured a round trip."""
        return self.last if self.last.round_trip_s > 0 else None

    def take(self, link: telemetry_pb2.Link, sent_at_s: float, now_s: float) -> None:
        """Adds a sanitized report. Older ones than the last, which may arrive twice, change nothing.

        An older one that has more bytes is no older one: the trainer's clock was set back.
        """
        if self.traffic.at_s and sent_at_s <= self.traffic.at_s[-1]:
            last_bytes = sum(column[-1] for column in self.traffic.columns)
            if link.up_bytes + link.down_bytes <= last_bytes:
                return
            self.traffic = Series(_SAMPLES, 2)
        self.last = telemetry_pb2.Link()
        self.last.CopyFrom(link)  # a copy, because a part of a message keeps the whole report alive
        self.heard_at_s = now_s
        self.traffic.append(sent_at_s, (link.up_bytes, link.down_bytes))

    def rates(self, now_s: float) -> tuple[float, float]:
        """Returns the bytes per second sent and received over the last `RATE_S` seconds; 0 without recent reports."""
        *before, last_s = self.traffic.at_s or (0.0,)
        if not before or now_s - self.heard_at_s > RATE_S:
            return 0.0, 0.0
        first = min(len(before) - 1, self.traffic.since(last_s - RATE_S))
        took_s = last_s - before[first]
        up, down = (max(0.0, column[-1] - column[first]) / took_s for column in self.traffic.columns)
        return up, down


def take_links(records: dict[str, LinkRecord], report: telemetry_pb2.TrainerReport, now_s: float) -> None:
    """Adds the links of a sanitized report to those of its run, of which there are at most `LINKS`."""
    for link in report.links:
        record = records.get(link.worker)
        if record is None:
            if len(records) >= LINKS:
                continue
            record = records[link.worker] = LinkRecord(link)
        record.take(link, report.sent_at_s, now_s)


@dataclass(frozen=True, slots=True)
class Alignment:
    """How a trainer's clock compares with this process's.

    Attributes:
        shift_s: Seconds to add to a time of the trainer's clock.
        error_s: The largest possible error of the shift, in seconds.
    """

    shift_s: float
    error_s: float


def alignment(links: Iterable[LinkRecord], clock_of: Mapping[str, tuple[float, float]]) -> Alignment | None:
    """Compares a trainer's clock with ours through the worker that makes the smallest error; None if none can.

    Args:
        links: The links of the trainer.
        clock_of: Our own comparison with each worker by its address: its clock minus ours, and the largest error.
    """
    through = [
        Alignment(clock.clock_offset_s - offset_s, clock.clock_error_s + error_s)
        for link in links
        if (clock := link.clock) is not None and clock.worker in clock_of
        for offset_s, error_s in [clock_of[clock.worker]]
        if error_s < inf
    ]
    return min(through, key=lambda way: way.error_s, default=None)
