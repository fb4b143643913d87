"""What trainers tell of their steps, held for whoever asks. The worker itself reads none of it."""

from collections import deque
from collections.abc import Iterator

from backhaul_proto.v1 import telemetry_pb2

HELD_BYTES = 8 << 20
ANSWER_BYTES = 256 << 10
_REPORT_BYTES = 128
"""What a report takes here beside its bytes."""


class TrainerReports:
    """The last reports of all trainers, bounded in bytes. Used in the event loop's thread.

    They are held as they are sent: a step that takes two bytes there takes a hundred as a message in memory.
    """

    def __init__(self) -> None:
        self._held: deque[bytes] = deque()
        self._bytes = 0
        self._last = 0

    def put(self, report: telemetry_pb2.TrainerReport) -> None:
        """Takes a report in; the oldest give way to it."""
        self._last += 1
        numbered = telemetry_pb2.Report(number=self._last, report=report).SerializeToString()
        self._held.append(numbered)
        self._bytes += _REPORT_BYTES + len(numbered)
        while self._bytes > HELD_BYTES:
            self._bytes -= _REPORT_BYTES + len(self._held.popleft())

    def after(self, number: int) -> tuple[list[bytes], bool]:
        """Those that came after a report, encoded, as many as fit a message, and whether there are more."""
        found: list[bytes] = []
        size = 0
        for report in self._newer(number):
            if found and size + len(report) > ANSWER_BYTES:
                return found, True
            found.append(report)
            size += len(report)
        return found, False

    def _newer(self, number: int) -> Iterator[bytes]:
        first = self._last - len(self._held) + 1
        start = max(0, number + 1 - first)
        return (self._held[i] for i in range(start, len(self._held)))
