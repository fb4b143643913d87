"""What trainers tell of their steps, held for whoever asks. The worker itself reads none of it."""

from collections import deque
from collections.abc import Iterator

from backhaul_proto.v1 import telemetry_pb2

HELD_BYTES = 8 << 20
ANSWER_BYTES = 1 << 20


class Reports:
    """The last reports of all trainers, bounded in bytes. Used in the event loop's thread."""

    def __init__(self) -> None:
        self._held: deque[tuple[telemetry_pb2.Report, int]] = deque()
        self._bytes = 0
        self._last = 0

    def put(self, report: telemetry_pb2.TrainerReport) -> None:
        """Takes a report in; the oldest give way to it."""
        self._last += 1
        numbered = telemetry_pb2.Report(number=self._last, report=report)
        size = numbered.ByteSize()
        self._held.append((numbered, size))
        self._bytes += size
        while self._bytes > HELD_BYTES:
            self._bytes -= self._held.popleft()[1]

    def after(self, number: int) -> tuple[list[telemetry_pb2.Report], bool]:
        """Those that came after a report, as many as fit a message, and whether there are more."""
        found: list[telemetry_pb2.Report] = []
        size = 0
        for report, size_bytes in self._newer(number):
            if found and size + size_bytes > ANSWER_BYTES:
                return found, True
            found.append(report)
            size += size_bytes
        return found, False

    def _newer(self, number: int) -> Iterator[tuple[telemetry_pb2.Report, int]]:
        first = self._last - len(self._held) + 1
        start = max(0, number + 1 - first)
        return (self._held[i] for i in range(start, len(self._held)))
