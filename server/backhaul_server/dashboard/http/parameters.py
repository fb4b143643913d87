"""The query parameters that several routes share."""

import time
from typing import TYPE_CHECKING, Annotated, Literal, get_origin

from fastapi import Depends, HTTPException, Query

from backhaul_server.dashboard.schemas.segments import SegmentStatus
from backhaul_server.dashboard.views.ranges import EVER, TimeRange

RUN = "9f86d081884c7d65"
LATEST_S = 4e9

OneRun = Annotated[
    str,
    Query(
        alias="run",
        max_length=64,
        description="A run's id; the one that began last where none is given",
        examples=[RUN],
    ),
]
AnyRun = Annotated[
    str, Query(alias="run", max_length=64, description="A run's id; all runs where none is given", examples=[RUN])
]
SomeRuns = Annotated[
    list[str],
    Query(
        alias="runs",
        max_length=64,
        description="Ids of several runs, such as the ranks of a training. May be given more than once, and goes "
        "before `run`",
        examples=[[RUN]],
    ),
]
Steps = Annotated[int, Query(ge=1, le=20, description="How many of the last steps of each run", examples=[3])]
Filter = Annotated[
    str,
    Query(
        alias="filter",
        max_length=200,
        description="Text in the segment, decision, any of the reasons or worker",
        examples=["Block"],
    ),
]
Reason = Annotated[
    str,
    Query(
        max_length=300,
        description="A reason that calls of the segment had, word for word",
        examples=["the worker is gone"],
    ),
]
if TYPE_CHECKING:
    Column = str
else:
    _FIELDS = SegmentStatus.model_fields.items()
    Column = Literal[tuple(name for name, field in _FIELDS if get_origin(field.annotation) is not list)]
Sort = Annotated[Column, Query(description="The column to sort by", examples=["calls"])]
Descending = Annotated[bool, Query(description="Largest first", examples=[True])]
Since = Annotated[
    float | None,
    Query(
        ge=0,
        le=LATEST_S,
        description="Beginning of the range, in seconds since 1970. Goes before `seconds`",
        examples=[1763769000.0],
    ),
]
Until = Annotated[
    float | None,
    Query(
        ge=0,
        le=LATEST_S,
        description="End of the range, in seconds since 1970; now where it is not given",
        examples=[1763769600.0],
    ),
]
Limit = Annotated[int, Query(ge=1, le=1_000, description="Items of a page at most", examples=[100])]
Cursor = Annotated[
    str,
    Query(
        max_length=1_000,
        description="`next` of the page before; the first page where it is not given",
        examples=["WzAsICJ3b3JrZXI6MTI3LjAuMC4xOjUwMDUxIl0"],
    ),
]


def last_seconds(seconds: float, since_s: float | None, until_s: float | None) -> TimeRange:
    """Returns the range that a request names: its beginning, or else the seconds before its end.

    Raises HTTPException 422 for a range that ends before it begins.
    """
    end_s = time.time() if until_s is None else until_s
    begin_s = end_s - seconds if since_s is None else since_s
    if begin_s > end_s:
        detail = {
            "type": "range",
            "loc": ["query", "since_s"],
            "msg": f"the range ends at {end_s:.0f}, before it begins",
        }
        raise HTTPException(422, [detail])
    return TimeRange(begin_s, end_s)


def _given_range(since_s: Since = None, until_s: Until = None) -> TimeRange:
    if since_s is None and until_s is None:
        return EVER
    return last_seconds(LATEST_S, 0.0 if since_s is None else since_s, until_s)


GivenRange = Annotated[TimeRange, Depends(_given_range)]
"""The range that a request names, or that of all times."""


def _some_or_any(run: AnyRun = "", runs: SomeRuns = []) -> list[str]:  # noqa: B006  FastAPI copies it
    return list(dict.fromkeys(runs or filter(None, [run])))


ChosenRuns = Annotated[list[str], Depends(_some_or_any)]
"""The ids of the runs that a request names, each once; none for all runs."""
