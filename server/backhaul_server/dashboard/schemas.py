"""What /api/v1 answers, for OpenAPI. Times are seconds since 1970; lists of a series are equally long, oldest first."""

from typing import Literal

from pydantic import BaseModel, Field

State = Literal["serving", "draining", "unreachable"]
Lane = Literal["forward", "upload", "queue", "recompute", "backward", "download", "wait", "trainer"]
Decision = Literal["gradients", "activations", "trainer", ""]


class Overview(BaseModel):
    """The headline."""

    at_s: float
    workers: int
    healthy_workers: int = Field(description="Serving, and heard of in the last 3 seconds")
    sessions: int = Field(description="Runs with an open session on some worker")
    steps_per_s: float = Field(description="Of all runs together, over the last 30 seconds")
    saved_bytes: int = Field(description="Packed by autograd less what trainers kept of it, at the end of last steps")
    peak_saved_bytes: int = Field(description="The same at the peak of the last steps")
    added_ms_per_step: float = Field(
        description="Exposed wait and own overhead less the forward time that recomputing here would have cost; mean "
        "of the steps of the last minute, negative where a step is faster than with a local recomputation"
    )
    wait_ms_per_step: float
    overhead_ms_per_step: float
    spared_ms_per_step: float = Field(description="Forward time that recomputing here would have cost")
    remote_share: float | None = Field(description="Of the recomputations of the last 5 minutes, None without any")
    fallbacks: int = Field(description="In the last 5 minutes")
    dropped_reports: int = Field(description="Steps and calls that trainers did not tell for want of room")
    history: str = Field(description="Why no history is kept, empty where it is", examples=[""])


class Memory(BaseModel):
    """Bytes a worker holds, by tier, and its budget."""

    budget_bytes: int
    segment_bytes: int = Field(description="Tensors that live segments name")
    cached_bytes: int = Field(description="Parameters and buffers kept for the next step")
    working_bytes: int = Field(description="Replays ahead of or under a request")
    result_bytes: int = Field(description="Finished results, kept for repeated requests")
    resident_bytes: int = Field(description="The whole process, as the kernel counts it")
    refusals: int = Field(description="Requests turned away for want of room")
    evictions: int = Field(description="Cached tensors, replays ahead and results given up for want of room")


class Session(BaseModel):
    """A trainer's stay on one worker."""

    worker: str
    trainer: str
    run: str = Field(description="The same for one trainer's sessions on several workers")
    client_version: str
    segments: int
    held_bytes: int = Field(description="Of the tensors its segments name; what sessions share counts in each")
    quota_share: float = Field(description="Of the worker's budget")
    idle_s: float = Field(description="Since it was last heard of")
    drift: float = Field(description="Relative difference between its numbers and the worker's, 0 for equal bits")
    last_error: str


class Worker(BaseModel):
    """A worker as it was last seen."""

    address: str
    state: State
    error: str = Field(description="Why it does not answer, empty while it does")
    seen_at_s: float = Field(description="When it last answered, 0 for never")
    version: str
    epoch: str = Field(description="Another one after a restart")
    device: str
    fingerprint: dict[str, str] = Field(description="What its numbers depend on and can't be set")
    uptime_s: float
    memory: Memory
    memory_share: float = Field(description="All tiers, of the budget")
    sessions: int
    recomputed_segments: int
    received_bytes: int
    sent_bytes: int
    queued_requests: int
    last_error: str = Field(description="Of the last request that failed by a fault of the worker's own")
    last_error_at_s: float


class Alert(BaseModel):
    """Something to look at, as long as it lasts."""

    name: str = Field(examples=["MemoryHigh"])
    severity: Literal["warning", "critical"]
    subject: str = Field(description="Which worker or run", examples=["127.0.0.1:50051"])
    summary: str = Field(description="What, with the values, and what to do")
    since_s: float


class Live(BaseModel):
    """An event of /api/v1/live, once a second."""

    overview: Overview
    workers: list[Worker]
    sessions: list[Session]
    alerts: list[Alert]
    runs: list["Run"] = Field(description="Those that told something in the last minute, and the last one")


class Mark(BaseModel):
    """Something that happened to memory."""

    at_s: float
    kind: Literal["eviction", "refusal"]
    count: int


class TierHistory(BaseModel):
    """A worker's memory over time, by tier."""

    worker: str
    budget_bytes: int
    at_s: list[float]
    segment_bytes: list[int]
    cached_bytes: list[int]
    working_bytes: list[int]
    result_bytes: list[int]
    marks: list[Mark]


class HeldHistory(BaseModel):
    """What one run's sessions held on all workers, and the trainer's own memory, over time."""

    run: str
    trainer: str
    budget_bytes: int = Field(description="Of its workers together")
    at_s: list[float]
    held_bytes: list[int]
    trainer_peak_bytes: list[int] = Field(description="The trainer's own peak so far, 0 before its first step")
    saved_bytes: list[int] = Field(description="What it does not hold thanks to its workers")


class MemoryHistory(BaseModel):
    """Memory over the last minutes, at most so many points each: a point is the largest of what it stands for."""

    workers: list[TierHistory]
    runs: list[HeldHistory]


class Rpc(BaseModel):
    """Calls of one method in the window; percentiles are right to within a fifth."""

    method: str
    calls: int
    errors: int
    p50_ms: float | None
    p90_ms: float | None
    p99_ms: float | None


class Heat(BaseModel):
    """How many calls took how long, over time."""

    at_s: list[float] = Field(description="Begin of each column")
    interval_s: float
    bounds_ms: list[float] = Field(description="Upper bound of each row but the last, which has none")
    counts: list[list[int]] = Field(description="By column, then by row")


class Phases(BaseModel):
    """Where the time of segments went, per step, milliseconds: sums over the step's segments."""

    run: str
    step: list[int]
    upload_ms: list[float]
    queue_ms: list[float]
    recompute_ms: list[float]
    backward_ms: list[float]
    download_ms: list[float]
    wait_ms: list[float]


class Latency(BaseModel):
    """Of RPCs as workers serve them, and of segments as trainers see them."""

    window_s: float
    rpcs: list[Rpc]
    heat: Heat
    phases: list[Phases]


class Span(BaseModel):
    """A bar of the timeline."""

    lane: Lane
    worker: str = Field(description="Empty for what the trainer does")
    row: int = Field(description="Within the lane, so that no two bars of a row overlap")
    start_ms: float = Field(description="Since the timeline's begin")
    duration_ms: float
    segment: str = Field(description="Name and position, as in the table of segments", examples=["Block #3"])
    call: int = Field(description="Index in calls")


class Call(BaseModel):
    """A checkpointed call in the timeline."""

    step: int
    segment: str
    worker: str
    decision: Decision
    reason: str
    is_fallback: bool
    up_bytes: int
    down_bytes: int
    retries: int
    mismatches: int
    drift: float
    overhead_ms: float


class TimelineStep(BaseModel):
    """A step in the timeline."""

    number: int
    start_ms: float
    duration_ms: float
    loss: float | None
    overlap: float | None = Field(
        description="Share of the time with remote work going on in which backward did not stand still for it"
    )
    wait_ms: float = Field(description="Exposed: backward stood still")


class Timeline(BaseModel):
    """The last steps of a run."""

    run: str
    begins_at_s: float
    duration_ms: float
    steps: list[TimelineStep]
    spans: list[Span]
    calls: list[Call]


class Segment(BaseModel):
    """All calls of one segment of a run that were told."""

    run: str
    segment: str = Field(examples=["Block #3"])
    calls: int
    up_bytes: int
    down_bytes: int
    local_ms: float = Field(description="Median of what it takes on the trainer: its forward")
    remote_ms: float = Field(description="Median of recompute and backward on a worker, 0 without any")
    wait_ms: float = Field(description="Median that backward stood still for it")
    overhead_ms: float = Field(description="Median that recording, digests and sending took")
    decision: Decision = Field(description="Of the last call")
    reason: str = Field(description="Why it was that")
    worker: str = Field(description="Of the last call")
    fallbacks: int
    mismatches: int
    drift: float
    retries: int


class Segments(BaseModel):
    """A page of the table."""

    total: int = Field(description="That match the filter")
    rows: list[Segment]


class Run(BaseModel):
    """A trainer from connect() to close()."""

    run: str
    trainer: str
    client_version: str
    workers: list[str]
    started_at_s: float
    heard_at_s: float
    state: Literal["running", "silent", "ended"] = Field(description="silent: nothing was heard for 30 seconds")
    settings: dict[str, str]
    fingerprint: dict[str, str]
    steps: int
    last_step: int
    last_loss: float | None
    median_step_ms: float | None = Field(description="Of the last 50 steps")
    peak_bytes: int = Field(description="The trainer's own")
    up_bytes: int
    down_bytes: int
    fallbacks: int


class RunSeries(BaseModel):
    """A run's steps, at most so many points: a point is the median of what it stands for, of bytes the largest."""

    run: str
    step: list[int]
    step_ms: list[float]
    peak_bytes: list[int]
    moved_bytes: list[int] = Field(description="Up and down")
    loss: list[float | None]
