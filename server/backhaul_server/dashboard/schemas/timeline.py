"""The last steps as bars."""

from typing import Literal

from pydantic import Field

from backhaul_server.dashboard.schemas import fields
from backhaul_server.dashboard.schemas.base import Schema
from backhaul_server.dashboard.schemas.segments import Decision

Lane = Literal["forward", "upload", "queue", "recompute", "backward", "download", "wait", "trainer"]


class Span(Schema):
    """A bar of the timeline."""

    lane: Lane = Field(description="The phase that the bar shows", examples=["backward"])
    worker: str = Field(
        description="Address of the worker; empty for work of the trainer", examples=["127.0.0.1:50051"]
    )
    row: int = Field(description="Row within the lane; no two bars of a row overlap", examples=[0])
    start_ms: float = Field(description="Milliseconds since the start of the timeline", examples=[512.25])
    duration_ms: float = Field(description="Length of the bar in milliseconds", examples=[62.5])
    segment: fields.Segment
    run: fields.RunId
    call: int = Field(description="Index of the call in `calls`", examples=[3])


class Call(Schema):
    """A checkpointed call in the timeline."""

    run: fields.RunId
    step: int = Field(description="Number of the step", examples=[1_043])
    segment: fields.Segment
    worker: str = Field(
        description="Address of the worker that got the segment; empty if none did", examples=["127.0.0.1:50051"]
    )
    decision: Decision = Field(
        description="What became of the call: what a worker returned, trainer, kept, or "
        "empty if nothing was recomputed",
        examples=["gradients"],
    )
    reason: str = Field(description="Why it was recomputed where it was, in words; may be empty", examples=[""])
    is_fallback: fields.IsFallback
    up_bytes: int = Field(description="Bytes sent for the call", examples=[5_347_737])
    down_bytes: int = Field(description="Bytes received for the call", examples=[5_242_880])
    retries: fields.Retries
    mismatches: fields.Mismatches
    drift: fields.Drift
    overhead_ms: float = Field(
        description="Time of recording, digests and sending in the trainer's own threads", examples=[5.1]
    )
    micro_batch: int = Field(
        description="Number of its micro-batch in an accumulation block, from 1; 0 outside a block", examples=[3]
    )
    is_known: bool = Field(
        description="Whether its program was known from an earlier call, so that it was not recorded", examples=[True]
    )
    recorded_because: str = Field(
        description="Why it was recorded although it was compiled, or should have been; empty for other calls",
        examples=[""],
    )


class BlockShare(Schema):
    """What one machine has computed in an accumulation block."""

    worker: str = Field(description="Address of the worker; empty for the trainer", examples=["127.0.0.1:50051"])
    segments: int = Field(description="Number of segments that it has computed", examples=[33])
    share: float = Field(description="Its share of the segments of the block", examples=[0.52])
    segment_ms: float = Field(
        description="Mean time of a segment: of recomputation and backward on the trainer, and from the request to the "
        "answer on a worker",
        examples=[46.0],
    )
    speed: float | None = Field(
        description="Its speed relative to the trainer; null if the trainer has computed no segment", examples=[0.85]
    )


class BlockStatus(Schema):
    """An accumulation block."""

    micro_batches: int = Field(description="Number of micro-batches in the block", examples=[8])
    took_ms: float = Field(description="Milliseconds from the beginning of the block to its end", examples=[2_640.0])
    pending_gradient_bytes: int = Field(
        description="The most bytes of gradients that were pending on the trainer", examples=[12_600_000]
    )
    speed_up: float | None = Field(
        description="Time that the trainer alone would have taken, over the time that the block took; null if the "
        "trainer has computed no segment",
        examples=[1.38],
    )
    shares: list[BlockShare] = Field(description="What the trainer and each worker have computed")


class TimelineStep(Schema):
    """A step in the timeline."""

    run: fields.RunId
    number: int = Field(description="Number of the step in its run", examples=[1_043])
    start_ms: float = Field(description="Milliseconds since the start of the timeline", examples=[0.0])
    duration_ms: float = Field(description="Duration of the step in milliseconds", examples=[902.4])
    loss: float | None = Field(
        description="Loss of the step; null if the training loop did not report it", examples=[2.71]
    )
    overlap: float | None = Field(
        description="Share of the time of remote work during which backward was not blocked",
        examples=[0.69],
    )
    wait_ms: float = Field(description="Exposed wait: time for which backward was blocked", examples=[187.8])
    block: BlockStatus | None = Field(description="The last accumulation block that ended in the step")


class TimelineRun(Schema):
    """A run in the timeline, and how its trainer's clock was aligned with the dashboard's."""

    run: fields.RunId
    name: fields.RunName
    trainer: fields.Trainer
    rank: fields.Rank
    shift_ms: float | None = Field(
        description="Milliseconds that were added to times of the trainer's clock, so that they are those of the "
        "dashboard's clock; null if the clocks could not be compared, and the times are the trainer's own",
        examples=[-1.8],
    )
    error_ms: float | None = Field(
        description="Largest possible error of `shift_ms`; null if the clocks could not be compared", examples=[0.4]
    )


class TimelineClock(Schema):
    """How a trainer's clock compares with that of one of its workers."""

    run: fields.RunId
    worker: str = Field(description="Address of the worker, as the trainer was given it", examples=["127.0.0.1:50051"])
    clock_offset_ms: fields.ClockOffsetMs
    clock_error_ms: fields.ClockErrorMs
    round_trip_ms: fields.RoundTripMs


class Timeline(Schema):
    """The last steps of one run, or of several on one axis."""

    run: str = Field(description="Id of the first shown run; empty if there is none", examples=["9f86d081884c7d65"])
    begins_at_s: float = Field(
        description="When the first shown step began, by the dashboard's clock if the trainer's is aligned with it",
        examples=[1763769597.2],
    )
    duration_ms: float = Field(
        description="Milliseconds from the start of the first step to the end of the last", examples=[2_711.0]
    )
    steps: list[TimelineStep] = Field(description="The shown steps, by run and number")
    runs: list[TimelineRun] = Field(description="The shown runs, in the order of the request")
    workers: list[TimelineClock] = Field(description="Clocks of the workers of the shown runs")
    why_empty: str = Field(
        description="A sentence that says why there are no bars, and what to do; empty if there are some", examples=[""]
    )
    note: str = Field(
        description="A sentence on runs that have no bars because their calls are not kept; empty if there is none, or "
        "if `why_empty` says it",
        examples=[""],
    )
    spans: list[Span] = Field(description="The bars, by lane")
    calls: list[Call] = Field(description="The calls that the bars belong to")
    left_out: int = Field(
        description="Number of spans left out, the shortest ones, if there are more than 4,000", examples=[0]
    )
