"""The table of segments."""

from typing import Literal

from pydantic import Field

from backhaul_server.dashboard.schemas import fields
from backhaul_server.dashboard.schemas.base import Schema

Decision = Literal["gradients", "activations", "trainer", "kept", ""]
"""What became of a call: what a worker returned; "trainer" if the trainer recomputed it; "kept" if its activations
stayed on the trainer, as without checkpointing; "" if nothing was recomputed."""


class SegmentReason(Schema):
    """Calls that got no gradients from a worker, by reason."""

    reason: str = Field(description="The reason, in the words of the trainer", examples=["the worker is gone"])
    decision: Decision = Field(description="Decision of the last of these calls", examples=["trainer"])
    is_fallback: bool = Field(description="Whether the last of these calls was meant for a worker", examples=[True])
    calls: int = Field(description="Number of calls with this reason", examples=[3])
    last_at_s: float = Field(description="When the last of these calls ended", examples=[1763769540.0])


class CountedText(Schema):
    """How often a trainer reported something."""

    text: str = Field(description="What was reported, in words", examples=["s.scale == 0.5 (train.py:8)"])
    times: int = Field(description="How often it was reported", examples=[1])


class SegmentStatus(Schema):
    """All reported calls of one segment of a run."""

    run: fields.RunId
    segment: fields.Segment
    calls: int = Field(description="Number of reported calls", examples=[1_043])
    up_bytes: fields.UpBytes
    down_bytes: fields.DownBytes
    local_ms: float = Field(description="Median forward time on the trainer", examples=[31.8])
    remote_ms: float = Field(
        description="Median time of recomputation and backward on a worker; 0 if there was none", examples=[95.9]
    )
    wait_ms: float = Field(description="Median time for which the segment blocked backward", examples=[30.4])
    overhead_ms: float = Field(description="Median time of recording, digests and sending", examples=[5.1])
    decision: Decision = Field(description="Decision of the last call", examples=["gradients"])
    reason: str = Field(description="Reason of that decision; may be empty", examples=[""])
    reasons: list[SegmentReason] = Field(
        description="Reasons for which calls got no gradients from a worker, the most recent first, at most 8"
    )
    worker: str = Field(description="Worker of the last call", examples=["127.0.0.1:50051"])
    fallbacks: fields.Fallbacks
    mismatches: fields.Mismatches
    drift: fields.Drift
    retries: fields.Retries
    known: int = Field(
        description="Number of calls that were not recorded, because their program was known from an earlier call",
        examples=[1_040],
    )
    programs: int = Field(description="Number of different programs that workers got, at most 100", examples=[1])
    compilations: int = Field(
        description="How often torch.compile has captured a graph, or made kernels for one. Equal layers share these, "
        "which count where they were made",
        examples=[1],
    )
    compile_s: float = Field(description="Seconds that torch.compile took for these", examples=[0.4])
    recorded: list[CountedText] = Field(
        description="Why calls were recorded although they were compiled, or should have been; the most recent last, "
        "at most 8"
    )
    recompiled: list[CountedText] = Field(
        description="Guards that no longer held when torch.compile captured another graph; the most recent last, at "
        "most 8"
    )


class SegmentList(Schema):
    """A page of the table of segments, which `offset` and `limit` choose, because any column may order it."""

    at_s: fields.Now
    total: int = Field(description="Number of segments that match the filters", examples=[1])
    offset: int = Field(description="Number of rows before this page", examples=[0])
    limit: int = Field(description="The most rows of a page", examples=[100])
    rows: list[SegmentStatus] = Field(description="The segments of this page")
    reasons: list[SegmentReason] = Field(
        description="Reasons of all segments of the runs, including those that do not match; most frequent first, at "
        "most 50"
    )
    note: str = Field(
        description="A sentence on runs whose segments are not kept, and what to do; empty if those of all runs are",
        examples=[""],
    )
