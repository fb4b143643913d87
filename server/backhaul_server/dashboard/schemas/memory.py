"""Memory of workers and trainers over time."""

from typing import Literal

from pydantic import Field

from backhaul_server.dashboard.schemas import fields
from backhaul_server.dashboard.schemas.base import Schema


class MemoryEvent(Schema):
    """Evictions or refusals of a worker within a second."""

    at_s: float = Field(description="When the increase was seen", examples=[1763769570.0])
    kind: Literal["eviction", "refusal"] = Field(
        description="Whether something was evicted or refused", examples=["eviction"]
    )
    count: int = Field(description="How many evictions or refusals there were", examples=[3])


class TierHistory(Schema):
    """A worker's memory over time, by tier."""

    worker: fields.WorkerAddress
    budget_bytes: int = Field(description="Bytes that all tiers together may take", examples=[4 << 30])
    at_s: fields.PointTimes
    segment_bytes: list[int] = Field(
        description="Tensors and programs that live segments name", examples=[[33_554_432, 27_962_026]]
    )
    cached_bytes: list[int] = Field(
        description="Tensors cached for the next step, such as parameters", examples=[[20_132_659, 20_132_659]]
    )
    working_bytes: list[int] = Field(
        description="The run in progress, and replays that are ready", examples=[[226_492_416, 188_743_680]]
    )
    result_bytes: list[int] = Field(
        description="Finished results, which are kept for repeated requests", examples=[[4_194_304, 0]]
    )
    marks: list[MemoryEvent] = Field(description="Evictions and refusals within the range")


class HeldHistory(Schema):
    """The bytes held for one run on all workers, and the memory of its trainer, over time."""

    run: fields.RunId
    trainer: fields.Trainer
    budget_bytes: int = Field(description="Budget of all workers of the run together", examples=[8 << 30])
    at_s: fields.PointTimes
    held_bytes: list[int] = Field(
        description="Bytes of the tensors that the run's segments name on all workers together",
        examples=[[33_554_432, 27_962_026]],
    )
    trainer_peak_bytes: list[int] = Field(
        description="Peak memory of the trainer so far; 0 before its first step", examples=[[702_545_920, 702_545_920]]
    )
    saved_bytes: list[int] = Field(
        description="Bytes that the workers spare the trainer", examples=[[233_700_000, 233_700_000]]
    )


class MemoryHistory(Schema):
    """Memory over the last minutes. Each point is the largest value of the interval that it stands for."""

    workers: list[TierHistory] = Field(description="The memory of every watched worker")
    runs: list[HeldHistory] = Field(description="The memory of every run that had a session in the range")
