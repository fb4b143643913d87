"""The table of segments as /api/v1 shows it, and as CSV."""

import csv
import io
import time
from collections.abc import Iterable, Iterator

from backhaul_server.dashboard.collect.segments import ReasonCount, Row, TextCount
from backhaul_server.dashboard.schemas.segments import SegmentList, SegmentReason, SegmentStatus

_LINES = 500


def segment_list(
    page: Iterable[Row], total: int, reasons: Iterable[ReasonCount], offset: int, limit: int, note: str
) -> SegmentList:
    """Returns a page of the table.

    Args:
        page: The rows to show.
        total: The number of rows on all pages.
        reasons: The reasons of the rows on all pages.
        offset: The number of rows before this page.
        limit: The largest number of rows of a page.
        note: A sentence on runs whose segments are not kept; empty if there are none.
    """
    return SegmentList(
        at_s=time.time(),
        total=total,
        offset=offset,
        limit=limit,
        rows=[SegmentStatus.model_validate(row, from_attributes=True) for row in page],
        reasons=[SegmentReason.model_validate(reason, from_attributes=True) for reason in reasons],
        note=note,
    )


def as_csv(rows: Iterable[Row]) -> Iterator[str]:
    """Yields all rows as CSV under a header, a few hundred lines at a time. No cell is a formula for a spreadsheet."""
    columns = list(SegmentStatus.model_fields)
    lines = io.StringIO()
    writer = csv.writer(lines)
    writer.writerow(columns)
    for index, row in enumerate(rows):
        writer.writerow([_cell(getattr(row, column)) for column in columns])
        if index % _LINES == 0:
            yield lines.getvalue()
            lines.seek(0)
            lines.truncate()
    yield lines.getvalue()


def _counted(entry: ReasonCount | TextCount) -> tuple[str, int]:
    return (entry.reason, entry.calls) if isinstance(entry, ReasonCount) else entry


def _cell(value: object) -> object:
    if isinstance(value, list):
        return _cell("; ".join(f"{times} x {text}" for text, times in map(_counted, value)))
    if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")):
        return f"'{value}"
    return value
