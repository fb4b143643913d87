"""What /api/v1 answers, for OpenAPI. Times are seconds since 1970; lists of a series are equally long, oldest first."""

from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

from backhaul_server.dashboard.collect.watched import State

Lane = Literal["forward", "upload", "queue", "recompute", "backward", "download", "wait", "trainer"]
Decision = Literal["gradients", "activations", "trainer", "kept", ""]
"""What became of a call: what a worker returned; "trainer" if the trainer recomputed it; "kept" if its activations
stayed on the trainer, as without checkpointing; "" if nothing was recomputed."""


def example_of(model: type[BaseModel]) -> dict[str, Any]:
    """What an answer looks like: the examples of its fields, put together. Raises KeyError for a field without one."""
    example = {}
    for name, field in model.model_fields.items():
        kinds = (field.annotation, *get_args(field.annotation))
        inner = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
        if field.examples:
            example[name] = field.examples[0]
        elif inner is not None:
            is_one = inner is field.annotation
            example[name] = example_of(inner) if is_one else [example_of(inner)]
        else:
            raise KeyError(f"{model.__name__}.{name} has no example")
    return example


def _with_example(schema: dict[str, Any], model: type[BaseModel]) -> None:
    schema["examples"] = [example_of(model)]


class Schema(BaseModel):
    """A model that OpenAPI shows with an example."""

    model_config = ConfigDict(json_schema_extra=_with_example)


class Overview(Schema):
    """The headline."""

    at_s: float = Field(examples=[1763769600.0])
    workers: int = Field(examples=[2])
    healthy_workers: int = Field(description="Serving, and heard of in the last 3 seconds", examples=[2])
    heard_at_s: float | None = Field(
        description="When a worker last answered, None if none ever did", examples=[1763769599.6]
    )
    stepped_at_s: float | None = Field(
        description="When the last step ended that any run told, None before the first", examples=[1763769599.2]
    )
    sessions: int | None = Field(
        description="Runs with an open session on some worker, None while no worker answers", examples=[1]
    )
    steps_per_s: float | None = Field(
        description="Of all runs together, over the last 30 seconds; None while no worker answers", examples=[1.1]
    )
    saved_bytes: int | None = Field(
        description="Packed by autograd less what trainers kept of it, the most in their last steps; None while no run "
        "is running",
        examples=[233_700_000],
    )
    peak_saved_bytes: int | None = Field(description="The same, the most since the runs began", examples=[241_200_000])
    added_ms_per_step: float | None = Field(
        description="Exposed wait and own overhead less the forward time that recomputing here would have cost; mean "
        "of the steps of the last minute, negative where a step is faster than with a local recomputation. None where "
        "no step ended in that minute, as for the three that follow",
        examples=[24.1],
    )
    wait_ms_per_step: float | None = Field(examples=[188.0])
    overhead_ms_per_step: float | None = Field(examples=[30.6])
    spared_ms_per_step: float | None = Field(
        description="Forward time that recomputing here would have cost", examples=[194.5]
    )
    remote_share: float | None = Field(
        description="Of the recomputations of the last 5 minutes, None without any", examples=[1.0]
    )
    fallbacks: int | None = Field(description="In the last 5 minutes, None while no worker answers", examples=[0])
    dropped_reports: int = Field(
        description="Steps and calls that trainers did not tell for want of room", examples=[0]
    )
    history: str = Field(description="Why no history is kept, empty where it is", examples=[""])


class Memory(Schema):
    """Bytes a worker holds, by tier, and its budget."""

    budget_bytes: int = Field(examples=[4 << 30])
    segment_bytes: int = Field(description="Tensors that live segments name", examples=[33_554_432])
    cached_bytes: int = Field(description="Parameters and buffers kept for the next step", examples=[20_132_659])
    working_bytes: int = Field(description="Replays ahead of or under a request", examples=[226_492_416])
    result_bytes: int = Field(description="Finished results, kept for repeated requests", examples=[4_194_304])
    resident_bytes: int = Field(description="The whole process, as the kernel counts it", examples=[566_231_040])
    refusals: int = Field(description="Requests turned away for want of room", examples=[0])
    evictions: int = Field(
        description="Cached tensors, replays ahead and results given up for want of room", examples=[12]
    )


class SessionStatus(Schema):
    """A trainer's stay on one worker."""

    worker: str = Field(examples=["127.0.0.1:50051"])
    trainer: str = Field(examples=["gpu-box:4711"])
    run: str = Field(
        description="The same for one trainer's sessions on several workers", examples=["9f86d081884c7d65"]
    )
    client_version: str = Field(examples=["0.1.0"])
    segments: int = Field(examples=[6])
    held_bytes: int = Field(
        description="Of the tensors its segments name; what sessions share counts in each", examples=[33_554_432]
    )
    quota_share: float = Field(description="Of the worker's budget", examples=[0.0078])
    idle_s: float = Field(description="Since it was last heard of", examples=[0.4])
    drift: float = Field(
        description="Relative difference between its numbers and the worker's, 0 for equal bits", examples=[0.0]
    )
    last_error: str = Field(examples=[""])


class WorkerStatus(Schema):
    """A worker as it was last seen."""

    address: str = Field(examples=["127.0.0.1:50051"])
    state: State = Field(examples=["serving"])
    error: str = Field(description="Why it does not answer, empty while it does", examples=[""])
    seen_at_s: float = Field(description="When it last answered, 0 for never", examples=[1763769599.6])
    version: str = Field(examples=["0.1.0"])
    epoch: str = Field(description="Another one after a restart", examples=["b5bb9d8014a0f9b1"])
    device: str = Field(examples=["cpu"])
    fingerprint: dict[str, str] = Field(
        description="What its numbers depend on and can't be set", examples=[{"torch": "2.13.0+cpu", "cpu": "AVX512"}]
    )
    uptime_s: float = Field(examples=[3605.2])
    memory: Memory
    memory_share: float = Field(description="All tiers, of the budget", examples=[0.066])
    sessions: int = Field(examples=[1])
    recomputed_segments: int = Field(examples=[5_412])
    received_bytes: int = Field(examples=[17_301_504_000])
    sent_bytes: int = Field(examples=[17_249_075_200])
    queued_requests: int = Field(examples=[1])
    last_error: str = Field(description="Of the last request that failed by a fault of the worker's own", examples=[""])
    last_error_at_s: float = Field(examples=[0.0])


class Alert(Schema):
    """Something to look at, as long as it lasts."""

    name: str = Field(examples=["MemoryHigh"])
    severity: Literal["warning", "critical"] = Field(examples=["warning"])
    subject: str = Field(description="Which worker or run", examples=["127.0.0.1:50051"])
    summary: str = Field(
        description="What, with the values, and what to do",
        examples=[
            "127.0.0.1:50051 used 87% of its memory in the last minute, the cache not counted. What does not fit runs "
            "on trainers: raise --memory, or add a worker"
        ],
    )
    since_s: float = Field(examples=[1763769540.0])


class MemoryEvent(Schema):
    """Something that happened to memory."""

    at_s: float = Field(examples=[1763769570.0])
    kind: Literal["eviction", "refusal"] = Field(examples=["eviction"])
    count: int = Field(examples=[3])


class TierHistory(Schema):
    """A worker's memory over time, by tier."""

    worker: str = Field(examples=["127.0.0.1:50051"])
    budget_bytes: int = Field(examples=[4 << 30])
    at_s: list[float] = Field(examples=[[1763769598.6, 1763769599.6]])
    segment_bytes: list[int] = Field(examples=[[33_554_432, 27_962_026]])
    cached_bytes: list[int] = Field(examples=[[20_132_659, 20_132_659]])
    working_bytes: list[int] = Field(examples=[[226_492_416, 188_743_680]])
    result_bytes: list[int] = Field(examples=[[4_194_304, 0]])
    marks: list[MemoryEvent]


class HeldHistory(Schema):
    """What one run's sessions held on all workers, and the trainer's own memory, over time."""

    run: str = Field(examples=["9f86d081884c7d65"])
    trainer: str = Field(examples=["gpu-box:4711"])
    budget_bytes: int = Field(description="Of its workers together", examples=[8 << 30])
    at_s: list[float] = Field(examples=[[1763769598.6, 1763769599.6]])
    held_bytes: list[int] = Field(examples=[[33_554_432, 27_962_026]])
    trainer_peak_bytes: list[int] = Field(
        description="The trainer's own peak so far, 0 before its first step", examples=[[702_545_920, 702_545_920]]
    )
    saved_bytes: list[int] = Field(
        description="What it does not hold thanks to its workers", examples=[[233_700_000, 233_700_000]]
    )


class MemoryHistory(Schema):
    """Memory over the last minutes, at most so many points each: a point is the largest of what it stands for."""

    workers: list[TierHistory]
    runs: list[HeldHistory]


class Rpc(Schema):
    """Calls of one method in the window; percentiles are right to within a fifth."""

    method: str = Field(examples=["Backward"])
    calls: int = Field(examples=[1_804])
    errors: int = Field(examples=[0])
    p50_ms: float | None = Field(examples=[31.2])
    p90_ms: float | None = Field(examples=[48.9])
    p99_ms: float | None = Field(examples=[96.4])


class Heat(Schema):
    """How many calls took how long, over time."""

    at_s: list[float] = Field(description="Begin of each column", examples=[[1763769594.0, 1763769597.0]])
    interval_s: float = Field(examples=[3.0])
    bounds_ms: list[float] = Field(
        description="Upper bound of each row but the last, which has none", examples=[[0.2, 0.4, 0.8]]
    )
    counts: list[list[int]] = Field(description="By column, then by row", examples=[[[0, 4, 12, 1], [1, 6, 9, 0]]])


class Phases(Schema):
    """Where the time of segments went, per step, milliseconds: sums over the step's segments."""

    run: str = Field(examples=["9f86d081884c7d65"])
    step: list[int] = Field(examples=[[1_042, 1_043]])
    upload_ms: list[float] = Field(examples=[[41.2, 40.8]])
    queue_ms: list[float] = Field(examples=[[12.0, 9.7]])
    recompute_ms: list[float] = Field(examples=[[196.1, 198.4]])
    backward_ms: list[float] = Field(examples=[[377.3, 380.9]])
    download_ms: list[float] = Field(examples=[[38.5, 37.9]])
    wait_ms: list[float] = Field(examples=[[188.2, 187.8]])


class Latency(Schema):
    """Of RPCs as workers serve them, and of segments as trainers see them."""

    window_s: float = Field(examples=[300.0])
    rpcs: list[Rpc]
    heat: Heat
    phases: list[Phases]


class Span(Schema):
    """A bar of the timeline."""

    lane: Lane = Field(examples=["backward"])
    worker: str = Field(description="Empty for what the trainer does", examples=["127.0.0.1:50051"])
    row: int = Field(description="Within the lane, so that no two bars of a row overlap", examples=[0])
    start_ms: float = Field(description="Since the timeline's begin", examples=[512.25])
    duration_ms: float = Field(examples=[62.5])
    segment: str = Field(description="Name and position, as in the table of segments", examples=["Block #3"])
    call: int = Field(description="Index in calls", examples=[3])


class Call(Schema):
    """A checkpointed call in the timeline."""

    step: int = Field(examples=[1_043])
    segment: str = Field(examples=["Block #3"])
    worker: str = Field(examples=["127.0.0.1:50051"])
    decision: Decision = Field(examples=["gradients"])
    reason: str = Field(examples=[""])
    is_fallback: bool = Field(examples=[False])
    up_bytes: int = Field(examples=[5_347_737])
    down_bytes: int = Field(examples=[5_242_880])
    retries: int = Field(examples=[0])
    mismatches: int = Field(examples=[0])
    drift: float = Field(examples=[0.0])
    overhead_ms: float = Field(examples=[5.1])


class TimelineStep(Schema):
    """A step in the timeline."""

    number: int = Field(examples=[1_043])
    start_ms: float = Field(examples=[0.0])
    duration_ms: float = Field(examples=[902.4])
    loss: float | None = Field(examples=[2.71])
    overlap: float | None = Field(
        description="Share of the time with remote work going on in which backward did not stand still for it",
        examples=[0.69],
    )
    wait_ms: float = Field(description="Exposed: backward stood still", examples=[187.8])


class Timeline(Schema):
    """The last steps of a run."""

    run: str = Field(examples=["9f86d081884c7d65"])
    begins_at_s: float = Field(examples=[1763769597.2])
    duration_ms: float = Field(examples=[2_711.0])
    steps: list[TimelineStep]
    spans: list[Span]
    calls: list[Call]
    left_out: int = Field(description="The shortest spans, where there are more than 4,000", examples=[0])


class SegmentReason(Schema):
    """Calls that did not get gradients from a worker, for one reason."""

    reason: str = Field(examples=["the worker is gone"])
    decision: Decision = Field(description="Of the last of them", examples=["trainer"])
    is_fallback: bool = Field(description="Whether a worker had been meant to recompute the last", examples=[True])
    calls: int = Field(examples=[3])
    last_at_s: float = Field(description="When the last of them ended", examples=[1763769540.0])


class SegmentStatus(Schema):
    """All calls of one segment of a run that were told."""

    run: str = Field(examples=["9f86d081884c7d65"])
    segment: str = Field(examples=["Block #3"])
    calls: int = Field(examples=[1_043])
    up_bytes: int = Field(examples=[5_577_572_352])
    down_bytes: int = Field(examples=[5_468_323_840])
    local_ms: float = Field(description="Median of what it takes on the trainer: its forward", examples=[31.8])
    remote_ms: float = Field(description="Median of recompute and backward on a worker, 0 without any", examples=[95.9])
    wait_ms: float = Field(description="Median that backward stood still for it", examples=[30.4])
    overhead_ms: float = Field(description="Median that recording, digests and sending took", examples=[5.1])
    decision: Decision = Field(description="Of the last call", examples=["gradients"])
    reason: str = Field(description="Why it was that", examples=[""])
    reasons: list[SegmentReason] = Field(
        description="Why calls so far, not only the last, got no gradients from a worker; the latest first, 8 at most"
    )
    worker: str = Field(description="Of the last call", examples=["127.0.0.1:50051"])
    fallbacks: int = Field(examples=[0])
    mismatches: int = Field(examples=[0])
    drift: float = Field(examples=[0.0])
    retries: int = Field(examples=[0])


class SegmentList(Schema):
    """A page of the table."""

    at_s: float = Field(description="Now, by the dashboard's clock", examples=[1763769600.0])
    total: int = Field(description="That match the filters", examples=[1])
    rows: list[SegmentStatus]
    reasons: list[SegmentReason] = Field(
        description="Of all rows of the runs, also those that don't match; the most frequent first, 50 at most"
    )


class RunSummary(Schema):
    """A trainer from connect() to close()."""

    run: str = Field(examples=["9f86d081884c7d65"])
    trainer: str = Field(examples=["gpu-box:4711"])
    client_version: str = Field(examples=["0.1.0"])
    workers: list[str] = Field(examples=[["127.0.0.1:50051", "127.0.0.1:50052"]])
    started_at_s: float = Field(examples=[1763768640.0])
    heard_at_s: float = Field(examples=[1763769599.6])
    state: Literal["running", "silent", "ended"] = Field(
        description="silent: nothing was heard for 30 seconds", examples=["running"]
    )
    settings: dict[str, str] = Field(examples=[{"returns": "auto", "numerics": "auto"}])
    fingerprint: dict[str, str] = Field(examples=[{"torch": "2.13.0+cpu", "cpu": "AVX512"}])
    steps: int = Field(examples=[1_044])
    last_step: int = Field(examples=[1_043])
    last_loss: float | None = Field(examples=[2.71])
    median_step_ms: float | None = Field(description="Of the last 50 steps", examples=[902.4])
    peak_bytes: int = Field(description="The trainer's own", examples=[702_545_920])
    up_bytes: int = Field(examples=[33_465_434_112])
    down_bytes: int = Field(examples=[32_809_943_040])
    fallbacks: int = Field(examples=[0])


class RunSeries(Schema):
    """A run's steps, at most so many points: a point is the median of what it stands for, of bytes the largest."""

    run: str = Field(examples=["9f86d081884c7d65"])
    step: list[int] = Field(examples=[[1_042, 1_043]])
    step_ms: list[float] = Field(examples=[[905.1, 902.4]])
    peak_bytes: list[int] = Field(examples=[[702_545_920, 702_545_920]])
    moved_bytes: list[int] = Field(description="Up and down", examples=[[63_522_734, 63_522_734]])
    loss: list[float | None] = Field(examples=[[2.73, 2.71]])


class Live(Schema):
    """An event of /api/v1/live, once a second."""

    overview: Overview
    workers: list[WorkerStatus]
    sessions: list[SessionStatus]
    alerts: list[Alert]
    runs: list[RunSummary] = Field(description="Those that told something in the last minute, and the newest one")
