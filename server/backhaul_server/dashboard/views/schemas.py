"""The answers of /api/v1. Times are in seconds since 1970. The lists of a series have equal lengths, oldest first."""

from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field

from backhaul_server.dashboard.collect.watched import State

Lane = Literal["forward", "upload", "queue", "recompute", "backward", "download", "wait", "trainer"]
Decision = Literal["gradients", "activations", "trainer", "kept", ""]
"""What became of a call: what a worker returned; "trainer" if the trainer recomputed it; "kept" if its activations
stayed on the trainer, as without checkpointing; "" if nothing was recomputed."""


def example_of(model: type[BaseModel]) -> dict[str, Any]:
    """Returns an example of a model, built from those of its fields. Raises KeyError for a field without an example."""
    example = {}
    for name, field in model.model_fields.items():
        kinds = (field.annotation, *get_args(field.annotation))
        inner = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
        if field.examples:
            example[name] = field.examples[0]
        elif inner is not None:
            is_list = get_origin(field.annotation) is list
            example[name] = [example_of(inner)] if is_list else example_of(inner)
        else:
            raise KeyError(f"{model.__name__}.{name} has no example")
    return example


def _with_example(schema: dict[str, Any], model: type[BaseModel]) -> None:
    schema["examples"] = [example_of(model)]


class Schema(BaseModel):
    """A model that OpenAPI shows with an example."""

    model_config = ConfigDict(json_schema_extra=_with_example)


class Overview(Schema):
    """The numbers of the headline."""

    at_s: float = Field(examples=[1763769600.0])
    workers: int = Field(examples=[2])
    healthy_workers: int = Field(description="Workers that serve and have answered in the last 3 seconds", examples=[2])
    heard_at_s: float | None = Field(
        description="When a worker last answered; None if none has answered yet", examples=[1763769599.6]
    )
    stepped_at_s: float | None = Field(
        description="When the last reported step of any run ended; None before the first", examples=[1763769599.2]
    )
    sessions: int | None = Field(
        description="Training runs with an open session on a worker; None while no worker answers", examples=[1]
    )
    steps_per_s: float | None = Field(
        description="Steps of all runs together over the last 30 seconds; None while no worker answers", examples=[1.1]
    )
    saved_bytes: int | None = Field(
        description="Bytes that autograd saved and trainers did not keep, at the peaks of their last steps; None while "
        "no run "
        "is running",
        examples=[233_700_000],
    )
    peak_saved_bytes: int | None = Field(
        description="The largest `saved_bytes` since the runs began", examples=[241_200_000]
    )
    added_ms_per_step: float | None = Field(
        description="Exposed wait plus overhead minus the time that local recomputation would have taken. The mean "
        "over "
        "the steps of the last minute; negative if a step is faster than with local recomputation. None if no step "
        "ended in that minute, as for the three fields that follow",
        examples=[24.1],
    )
    wait_ms_per_step: float | None = Field(examples=[188.0])
    overhead_ms_per_step: float | None = Field(examples=[30.6])
    spared_ms_per_step: float | None = Field(
        description="Time that local recomputation would have taken", examples=[194.5]
    )
    remote_share: float | None = Field(
        description="Share of the recomputations of the last 5 minutes that ran on workers; None if there were none",
        examples=[1.0],
    )
    fallbacks: int | None = Field(
        description="Fallbacks in the last 5 minutes; None while no worker answers", examples=[0]
    )
    dropped_reports: int = Field(
        description="Steps and calls that were not reported or not kept because queues were full", examples=[0]
    )
    history: str = Field(description="Why no history is kept; empty while it is kept", examples=[""])


class Memory(Schema):
    """Bytes that a worker holds, by tier, and its budget."""

    budget_bytes: int = Field(examples=[4 << 30])
    segment_bytes: int = Field(description="Tensors and programs that live segments name", examples=[33_554_432])
    cached_bytes: int = Field(description="Tensors cached for the next step, such as parameters", examples=[20_132_659])
    working_bytes: int = Field(description="The run in progress, and replays that are ready", examples=[226_492_416])
    result_bytes: int = Field(
        description="Finished results, which are kept for repeated requests", examples=[4_194_304]
    )
    resident_bytes: int = Field(description="Resident memory of the whole process", examples=[566_231_040])
    refusals: int = Field(description="Requests refused because memory was short", examples=[0])
    evictions: int = Field(
        description="Cached tensors, speculative replays and results evicted because memory was short", examples=[12]
    )


class SessionStatus(Schema):
    """A session of a trainer on one worker."""

    worker: str = Field(examples=["127.0.0.1:50051"])
    trainer: str = Field(examples=["gpu-box:4711"])
    run: str = Field(description="Id of the training run, equal for all of its sessions", examples=["9f86d081884c7d65"])
    client_version: str = Field(examples=["0.1.0"])
    segments: int = Field(examples=[6])
    held_bytes: int = Field(
        description="Bytes of the tensors that its segments name. A tensor shared by sessions counts in each of them",
        examples=[33_554_432],
    )
    quota_share: float = Field(description="`held_bytes` as a share of the worker's budget", examples=[0.0078])
    idle_s: float = Field(description="Seconds since its last request", examples=[0.4])
    drift: float = Field(
        description="Largest relative difference between the numbers of trainer and worker; 0 if all bits are equal",
        examples=[0.0],
    )
    last_error: str = Field(examples=[""])


class WorkerStatus(Schema):
    """A worker, as of its last answer."""

    address: str = Field(examples=["127.0.0.1:50051"])
    state: State = Field(examples=["serving"])
    error: str = Field(description="Why the worker does not answer; empty while it does", examples=[""])
    seen_at_s: float = Field(description="When the worker last answered; 0 if it never has", examples=[1763769599.6])
    version: str = Field(examples=["0.1.0"])
    epoch: str = Field(description="Random name of the process, new after each restart", examples=["b5bb9d8014a0f9b1"])
    device: str = Field(examples=["cpu"])
    fingerprint: dict[str, str] = Field(
        description="What the worker's numbers depend on: equal fingerprints compute equal bits",
        examples=[{"torch": "2.13.0+cpu", "cpu": "AVX512"}],
    )
    uptime_s: float = Field(examples=[3605.2])
    memory: Memory
    memory_share: float = Field(description="All tiers together, as a share of the budget", examples=[0.066])
    sessions: int = Field(examples=[1])
    recomputed_segments: int = Field(examples=[5_412])
    received_bytes: int = Field(examples=[17_301_504_000])
    sent_bytes: int = Field(examples=[17_249_075_200])
    queued_requests: int = Field(examples=[1])
    last_error: str = Field(
        description="Message of the last request that failed by a fault of the worker", examples=[""]
    )
    last_error_at_s: float = Field(examples=[0.0])


class Alert(Schema):
    """An alert that fires now."""

    name: str = Field(examples=["MemoryHigh"])
    severity: Literal["warning", "critical"] = Field(examples=["warning"])
    subject: str = Field(description="Address of the worker, or id of the run", examples=["127.0.0.1:50051"])
    summary: str = Field(
        description="What happened, with the values, and what to do",
        examples=[
            "Worker 127.0.0.1:50051 used 87% of its memory in the last minute, not counting its cache. Segments that "
            "do not fit run on the trainers. Raise --memory, or add a worker"
        ],
    )
    since_s: float = Field(examples=[1763769540.0])


class MemoryEvent(Schema):
    """Evictions or refusals of a worker within a second."""

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
    """The bytes held for one run on all workers, and the memory of its trainer, over time."""

    run: str = Field(examples=["9f86d081884c7d65"])
    trainer: str = Field(examples=["gpu-box:4711"])
    budget_bytes: int = Field(description="Budget of all workers of the run together", examples=[8 << 30])
    at_s: list[float] = Field(examples=[[1763769598.6, 1763769599.6]])
    held_bytes: list[int] = Field(examples=[[33_554_432, 27_962_026]])
    trainer_peak_bytes: list[int] = Field(
        description="Peak memory of the trainer so far; 0 before its first step", examples=[[702_545_920, 702_545_920]]
    )
    saved_bytes: list[int] = Field(
        description="Bytes that the workers spare the trainer", examples=[[233_700_000, 233_700_000]]
    )


class MemoryHistory(Schema):
    """Memory over the last minutes. Each point is the largest value of the interval that it stands for."""

    workers: list[TierHistory]
    runs: list[HeldHistory]


class Rpc(Schema):
    """Calls of one method within the window. Percentiles are accurate to 20 %."""

    method: str = Field(examples=["Backward"])
    calls: int = Field(examples=[1_804])
    errors: int = Field(examples=[0])
    p50_ms: float | None = Field(examples=[31.2])
    p90_ms: float | None = Field(examples=[48.9])
    p99_ms: float | None = Field(examples=[96.4])


class Heat(Schema):
    """The number of calls by duration and time."""

    at_s: list[float] = Field(description="Start of each column", examples=[[1763769594.0, 1763769597.0]])
    interval_s: float = Field(examples=[3.0])
    bounds_ms: list[float] = Field(
        description="Upper bound of each row. The last row has none", examples=[[0.2, 0.4, 0.8]]
    )
    counts: list[list[int]] = Field(
        description="Number of calls by column, then by row", examples=[[[0, 4, 12, 1], [1, 6, 9, 0]]]
    )


class Phases(Schema):
    """Time of each phase by step, in milliseconds, summed over the segments of the step."""

    run: str = Field(examples=["9f86d081884c7d65"])
    step: list[int] = Field(examples=[[1_042, 1_043]])
    upload_ms: list[float] = Field(examples=[[41.2, 40.8]])
    queue_ms: list[float] = Field(examples=[[12.0, 9.7]])
    recompute_ms: list[float] = Field(examples=[[196.1, 198.4]])
    backward_ms: list[float] = Field(examples=[[377.3, 380.9]])
    download_ms: list[float] = Field(examples=[[38.5, 37.9]])
    wait_ms: list[float] = Field(examples=[[188.2, 187.8]])


class Latency(Schema):
    """Latency of RPCs, measured on workers, and of segments, measured on trainers."""

    window_s: float = Field(examples=[300.0])
    rpcs: list[Rpc]
    heat: Heat
    phases: list[Phases]


class Span(Schema):
    """A bar of the timeline."""

    lane: Lane = Field(examples=["backward"])
    worker: str = Field(
        description="Address of the worker; empty for work of the trainer", examples=["127.0.0.1:50051"]
    )
    row: int = Field(description="Row within the lane; no two bars of a row overlap", examples=[0])
    start_ms: float = Field(description="Milliseconds since the start of the timeline", examples=[512.25])
    duration_ms: float = Field(examples=[62.5])
    segment: str = Field(
        description="Name and position of the segment, as in the table of segments", examples=["Block #3"]
    )
    call: int = Field(description="Index of the call in `calls`", examples=[3])


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
    micro_batch: int = Field(
        description="Number of its micro-batch in an accumulation block, from 1; 0 outside a block", examples=[3]
    )


class BlockShare(Schema):
    """What one machine has computed in an accumulation block."""

    worker: str = Field(description="Address of the worker; empty for the trainer", examples=["127.0.0.1:50051"])
    segments: int = Field(examples=[33])
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

    micro_batches: int = Field(examples=[8])
    took_ms: float = Field(examples=[2_640.0])
    held_bytes: int = Field(description="The most bytes of gradients that the trainer held back", examples=[12_600_000])
    speed_up: float | None = Field(
        description="Time that the trainer alone would have taken, over the time that the block took; null if the "
        "trainer has computed no segment",
        examples=[1.38],
    )
    shares: list[BlockShare]


class TimelineStep(Schema):
    """A step in the timeline."""

    number: int = Field(examples=[1_043])
    start_ms: float = Field(examples=[0.0])
    duration_ms: float = Field(examples=[902.4])
    loss: float | None = Field(examples=[2.71])
    overlap: float | None = Field(
        description="Share of the time of remote work during which backward was not blocked",
        examples=[0.69],
    )
    wait_ms: float = Field(description="Exposed wait: time for which backward was blocked", examples=[187.8])
    block: BlockStatus | None = Field(description="The last accumulation block that ended in the step")


class Timeline(Schema):
    """The last steps of a run."""

    run: str = Field(examples=["9f86d081884c7d65"])
    begins_at_s: float = Field(examples=[1763769597.2])
    duration_ms: float = Field(examples=[2_711.0])
    steps: list[TimelineStep]
    spans: list[Span]
    calls: list[Call]
    left_out: int = Field(
        description="Number of spans left out, the shortest ones, if there are more than 4,000", examples=[0]
    )


class SegmentReason(Schema):
    """Calls that got no gradients from a worker, by reason."""

    reason: str = Field(examples=["the worker is gone"])
    decision: Decision = Field(description="Decision of the last of these calls", examples=["trainer"])
    is_fallback: bool = Field(description="Whether the last of these calls was meant for a worker", examples=[True])
    calls: int = Field(examples=[3])
    last_at_s: float = Field(description="When the last of these calls ended", examples=[1763769540.0])


class SegmentStatus(Schema):
    """All reported calls of one segment of a run."""

    run: str = Field(examples=["9f86d081884c7d65"])
    segment: str = Field(examples=["Block #3"])
    calls: int = Field(examples=[1_043])
    up_bytes: int = Field(examples=[5_577_572_352])
    down_bytes: int = Field(examples=[5_468_323_840])
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
    fallbacks: int = Field(examples=[0])
    mismatches: int = Field(examples=[0])
    drift: float = Field(examples=[0.0])
    retries: int = Field(examples=[0])


class SegmentList(Schema):
    """A page of the table of segments."""

    at_s: float = Field(description="Current time of the dashboard's clock", examples=[1763769600.0])
    total: int = Field(description="Number of segments that match the filters", examples=[1])
    rows: list[SegmentStatus]
    reasons: list[SegmentReason] = Field(
        description="Reasons of all segments of the runs, including those that do not match; most frequent first, at "
        "most 50"
    )


class RunSummary(Schema):
    """A training run, from connect() to close()."""

    run: str = Field(examples=["9f86d081884c7d65"])
    trainer: str = Field(examples=["gpu-box:4711"])
    client_version: str = Field(examples=["0.1.0"])
    workers: list[str] = Field(examples=[["127.0.0.1:50051", "127.0.0.1:50052"]])
    started_at_s: float = Field(examples=[1763768640.0])
    heard_at_s: float = Field(examples=[1763769599.6])
    state: Literal["running", "silent", "ended"] = Field(
        description="silent: the trainer has not reported for 30 seconds", examples=["running"]
    )
    settings: dict[str, str] = Field(examples=[{"returns": "auto", "numerics": "auto"}])
    fingerprint: dict[str, str] = Field(examples=[{"torch": "2.13.0+cpu", "cpu": "AVX512"}])
    steps: int = Field(examples=[1_044])
    last_step: int = Field(examples=[1_043])
    last_loss: float | None = Field(examples=[2.71])
    median_step_ms: float | None = Field(description="Median time of the last 50 steps", examples=[902.4])
    peak_bytes: int = Field(description="Peak memory of the trainer", examples=[702_545_920])
    up_bytes: int = Field(examples=[33_465_434_112])
    down_bytes: int = Field(examples=[32_809_943_040])
    fallbacks: int = Field(examples=[0])


class RunSeries(Schema):
    """The steps of a run. A point for several steps has their median time and loss, and their largest bytes."""

    run: str = Field(examples=["9f86d081884c7d65"])
    step: list[int] = Field(examples=[[1_042, 1_043]])
    step_ms: list[float] = Field(examples=[[905.1, 902.4]])
    peak_bytes: list[int] = Field(examples=[[702_545_920, 702_545_920]])
    moved_bytes: list[int] = Field(description="Bytes sent and received in a step", examples=[[63_522_734, 63_522_734]])
    loss: list[float | None] = Field(examples=[[2.73, 2.71]])


class Live(Schema):
    """An event of /api/v1/live, once a second."""

    overview: Overview
    workers: list[WorkerStatus]
    sessions: list[SessionStatus]
    alerts: list[Alert]
    runs: list[RunSummary] = Field(description="Runs that reported in the last minute, and the newest run")
