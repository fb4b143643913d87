"""The reports of trainers about their steps, kept for dashboards. The worker itself does not use them."""

from collections import deque
from collections.abc import Iterator

from backhaul_proto.v1 import telemetry_pb2

MAX_BYTES = 8 << 20
ANSWER_BYTES = 256 << 10
_REPORT_BYTES = 128
"""Bytes of a kept report beside its encoding."""


class TrainerReports:
    """The last reports of all trainers, bounded in bytes. Event loop only.

    Reports are kept encoded: a step of two bytes takes a hundred as a message object.
    """

    def __init__(self) -> None:
        self._reports: deque[tuple[str, bytes]] = deque()  # with the name of the credential
        self._bytes = 0
        self._last = 0

    def put(self, report: telemetry_pb2.TrainerReport, credential: str) -> None:
        """Adds a report of a trainer with this credential, and drops the oldest ones beyond `MAX_BYTES`."""
        self._last += 1
        numbered = telemetry_pb2.Report(number=self._last, report=report).SerializeToString()
        self._reports.append((credential, numbered))
        self._bytes += _REPORT_BYTES + len(numbered)
        while self._bytes > MAX_BYTES:
            self._bytes -= _REPORT_BYTES + len(self._reports.popleft()[1])

    def after(self, number: int, credential: str | None) -> tuple[list[bytes], bool]:
        """Returns encoded reports after that number, as many as fit one answer, and whether there are more.

        Args:
            number: The number of a report.
            credential: Leaves out the reports of other credentials; None for the reports of all.
        """
        reports: list[bytes] = []
        size = 0
        for report in self._newer(number, credential):
            if reports and size + len(report) > ANSWER_BYTES:
                return reports, True
            reports.append(report)
            size += len(report)
        return reports, False

    def _newer(self, number: int, credential: str | None) -> Iterator[bytes]:
        first = self._last - len(self._reports) + 1
        start = max(0, number + 1 - first)
        newer = (self._reports[i] for i in range(start, len(self._reports)))
        return (report for owner, report in newer if credential is None or owner == credential)
