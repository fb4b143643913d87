"""The state at this moment: headline, workers, sessions and alerts."""

from typing import Literal

from pydantic import Field

from backhaul_server.dashboard.schemas import fields
from backhaul_server.dashboard.schemas.base import Schema

State = Literal["serving", "draining", "unreachable"]


class Overview(Schema):
    """The numbers of the headline."""

    at_s: fields.Now
    workers: int = Field(description="Number of watched workers", examples=[2])
    healthy_workers: int = Field(description="Workers that answer and serve", examples=[2])
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
        "no run is running",
        examples=[233_700_000],
    )
    peak_saved_bytes: int | None = Field(
        description="The largest `saved_bytes` since the runs began", examples=[241_200_000]
    )
    added_ms_per_step: float | None = Field(
        description="Exposed wait plus overhead minus the time that local recomputation would have taken. The mean "
        "over the steps of the last minute; negative if a step is faster than with local recomputation. None if no "
        "step ended in that minute, as for the three fields that follow",
        examples=[24.1],
    )
    wait_ms_per_step: float | None = Field(
        description="Time for which backward was blocked by workers", examples=[188.0]
    )
    overhead_ms_per_step: float | None = Field(
        description="Time of recording, digests and sending in the trainers' own threads", examples=[30.6]
    )
    spared_ms_per_step: float | None = Field(
        description="Time that the trainers themselves would have taken for what workers did", examples=[194.5]
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

    budget_bytes: int = Field(description="Bytes that all tiers together may take", examples=[4 << 30])
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
    reserve_bytes: int = Field(
        description="What a GPU takes beside all tiers: rounding, workspaces of cuBLAS and cuDNN, and what other "
        "processes leave it too little of. 0 on a CPU",
        examples=[67_108_864],
    )


class AcceleratorStatus(Schema):
    """The device that a worker computes on, with what other processes do on it."""

    name: str = Field(description="Name of the device, as its driver calls it", examples=["NVIDIA H100 80GB HBM3"])
    utilization: float | None = Field(
        description="Share of the last moments in which a kernel ran, from 0 to 1; null if the driver does not tell",
        examples=[0.83],
    )
    used_bytes: int = Field(description="Bytes in use by all processes", examples=[21_474_836_480])
    total_bytes: int = Field(description="Bytes that the device has", examples=[85_520_809_984])


class SessionStatus(Schema):
    """A session of a trainer on one worker."""

    id: str = Field(
        description="A name that stays the same while the session is open",
        examples=["session:127.0.0.1:50051/9f86d081884c7d65"],
    )
    worker: fields.WorkerAddress
    trainer: fields.Trainer
    run: fields.RunId
    client_version: fields.ClientVersion
    segments: int = Field(description="Segments of the session that wait for their backward", examples=[6])
    held_bytes: int = Field(
        description="Bytes of the tensors that its segments name. A tensor shared by sessions counts in each of them",
        examples=[33_554_432],
    )
    quota_share: float = Field(description="`held_bytes` as a share of the worker's budget", examples=[0.0078])
    idle_s: float = Field(description="Seconds since its last request", examples=[0.4])
    drift: fields.Drift
    last_error: str = Field(
        description="Message of the session's last request that was refused or failed; empty if none was", examples=[""]
    )


class WorkerStatus(Schema):
    """A worker, as of its last answer. The numbers of an unreachable worker are as old as `seen_at_s`."""

    id: str = Field(
        description="A name that stays the same, also as a node of /api/v1/topology",
        examples=["worker:127.0.0.1:50051"],
    )
    address: fields.WatchedAddress
    state: State = Field(
        description="What the worker does: serving, draining (it finishes its work, and takes nothing new) or "
        "unreachable",
        examples=["serving"],
    )
    error: str = Field(description="Why the worker does not answer; empty while it does", examples=[""])
    seen_at_s: fields.WorkerSeen
    version: str = Field(description="Version of Backhaul on the worker", examples=["0.1.0"])
    epoch: str = Field(description="Random name of the process, new after each restart", examples=["b5bb9d8014a0f9b1"])
    device: str = Field(description="The device that the worker computes on, in torch's notation", examples=["cpu"])
    fingerprint: dict[str, str] = Field(
        description="What the worker's numbers depend on: equal fingerprints compute equal bits",
        examples=[{"torch": "2.13.0+cpu", "cpu": "AVX512"}],
    )
    uptime_s: float = Field(description="Seconds since the worker started", examples=[3605.2])
    memory: Memory = Field(description="Bytes that the worker held at `seen_at_s`, by tier")
    memory_share: float = Field(
        description="All tiers together at `seen_at_s`, as a share of the budget", examples=[0.066]
    )
    sessions: int = Field(description="Number of open sessions of trainers at `seen_at_s`", examples=[1])
    recomputed_segments: int = Field(
        description="Replays that have run since the worker started, including speculative ones", examples=[5_412]
    )
    received_bytes: int = Field(
        description="Bytes of received messages since the worker started", examples=[17_301_504_000]
    )
    sent_bytes: int = Field(description="Bytes of sent messages since the worker started", examples=[17_249_075_200])
    queued_requests: int = Field(description="Requests that waited or ran at `seen_at_s`", examples=[1])
    last_error: str = Field(
        description="Message of the last request that failed by a fault of the worker", examples=[""]
    )
    load: float | None = Field(
        description="Share of the last second in which the worker computed, from 0 to 1; null if it does not tell, or "
        "while it is unreachable",
        examples=[0.61],
    )
    busy_s: float = Field(description="Seconds that the worker has computed since it started", examples=[2199.1])
    spared_bytes: int = Field(
        description="Bytes of tensors that trainers did not send, because they sent differences from earlier ones",
        examples=[0],
    )
    accelerator: AcceleratorStatus | None = Field(
        description="The worker's GPU; null if it has none, or if the extra nvml is not installed on it"
    )
    last_error_at_s: float = Field(description="When that request failed; 0 if none did", examples=[0.0])


class Alert(Schema):
    """An alert that fires now."""

    id: str = Field(
        description="A name that stays the same while the alert fires", examples=["MemoryHigh:127.0.0.1:50051"]
    )
    name: str = Field(description="Name of the alert, the same as in Prometheus", examples=["MemoryHigh"])
    severity: Literal["warning", "critical"] = Field(
        description="critical: segments are not recomputed remotely while the alert fires", examples=["warning"]
    )
    subject: str = Field(description="Address of the worker, or id of the run", examples=["127.0.0.1:50051"])
    summary: str = Field(
        description="What happened, with the values, and what to do",
        examples=[
            "Worker 127.0.0.1:50051 used 87.2 % of its memory in the last minute, not counting its cache. Segments "
            "that do not fit run on the trainers. Raise --memory, or add a worker"
        ],
    )
    since_s: float = Field(description="When the condition of the alert began to hold", examples=[1763769540.0])
