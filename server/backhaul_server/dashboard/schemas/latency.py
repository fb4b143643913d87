"""Durations of RPCs and phases."""

from pydantic import Field

from backhaul_server.dashboard.schemas import fields
from backhaul_server.dashboard.schemas.base import Schema


class Rpc(Schema):
    """Calls of one method within the window. Percentiles are accurate to 20 %."""

    method: str = Field(description="Name of the RPC", examples=["Backward"])
    calls: int = Field(description="Number of calls that succeeded", examples=[1_804])
    errors: int = Field(description="Number of calls that failed", examples=[0])
    p50_ms: float | None = Field(description="Median duration in milliseconds; null without calls", examples=[31.2])
    p90_ms: float | None = Field(
        description="Duration that 90 % of the calls did not exceed, in milliseconds; null without calls",
        examples=[48.9],
    )
    p99_ms: float | None = Field(
        description="Duration that 99 % of the calls did not exceed, in milliseconds; null without calls",
        examples=[96.4],
    )


class Heat(Schema):
    """The number of calls by duration and time."""

    at_s: list[float] = Field(description="Start of each column", examples=[[1763769594.0, 1763769597.0]])
    interval_s: float = Field(description="Seconds that each column covers", examples=[3.0])
    bounds_ms: list[float] = Field(
        description="Upper bound of each row. The last row has none", examples=[[0.2, 0.4, 0.8]]
    )
    counts: list[list[int]] = Field(
        description="Number of calls by column, then by row", examples=[[[0, 4, 12, 1], [1, 6, 9, 0]]]
    )


class Phases(Schema):
    """Time of each phase by step, in milliseconds, summed over the segments of the step."""

    run: fields.RunId
    step: list[int] = Field(description="Numbers of the steps", examples=[[1_042, 1_043]])
    at_s: list[float] = Field(
        description="When each step began, by the trainer's clock", examples=[[1763769597.2, 1763769598.1]]
    )
    upload_ms: list[float] = Field(description="Sending inputs to workers", examples=[[41.2, 40.8]])
    queue_ms: list[float] = Field(description="Waiting behind other work of the worker", examples=[[12.0, 9.7]])
    recompute_ms: list[float] = Field(description="Recomputation on workers", examples=[[196.1, 198.4]])
    backward_ms: list[float] = Field(description="Backward of segments on workers", examples=[[377.3, 380.9]])
    download_ms: list[float] = Field(description="Fetching results from workers", examples=[[38.5, 37.9]])
    wait_ms: list[float] = Field(
        description="Time for which backward was blocked by workers", examples=[[188.2, 187.8]]
    )


class Latency(Schema):
    """Latency of RPCs, measured on workers, and of segments, measured on trainers."""

    window_s: float = Field(description="Seconds that the percentiles and the heat map cover", examples=[300.0])
    rpcs: list[Rpc] = Field(description="Percentiles by RPC, sorted by name")
    heat: Heat = Field(description="Calls by duration and time")
    phases: list[Phases] = Field(description="Phases of segments by run")
