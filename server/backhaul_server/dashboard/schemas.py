"""What /api/v1 answers, for OpenAPI."""

from pydantic import BaseModel, Field

from backhaul_server.dashboard.watch import Watched


class Memory(BaseModel):
    """Bytes a worker holds, by tier, and its budget."""

    budget_bytes: int
    segment_bytes: int = Field(description="Tensors that live segments name")
    cached_bytes: int = Field(description="Parameters and buffers kept for the next step")
    working_bytes: int = Field(description="Replays ahead of or under a request")
    result_bytes: int = Field(description="Finished results, kept for repeated requests")
    resident_bytes: int = Field(description="The whole process, as the kernel counts it")
    refusals: int = Field(description="Requests turned away for want of room")


class Rpc(BaseModel):
    """Calls of one method so far, and percentiles of the last 4,096."""

    method: str
    calls: int
    errors: int
    p50_s: float
    p90_s: float
    p99_s: float


class Session(BaseModel):
    """A trainer's stay."""

    trainer: str
    segments: int
    idle_s: float
    drift: float = Field(description="Relative difference between its numbers and the worker's, 0 for equal bits")


class Worker(BaseModel):
    """A worker as it was last seen."""

    address: str
    state: str = Field(description="serving, draining or unreachable", examples=["serving"])
    error: str = Field(description="Why it does not answer, empty while it does")
    seen_at_s: float = Field(description="When it last answered, seconds since 1970, 0 for never")
    version: str
    device: str
    uptime_s: float
    memory: Memory
    sessions: list[Session]
    rpcs: list[Rpc]
    recomputed_segments: int
    received_bytes: int
    sent_bytes: int
    queued_requests: int


class MemoryHistory(BaseModel):
    """A worker's memory over the last ten minutes; lists of equal length, oldest first."""

    address: str
    budget_bytes: int
    at_s: list[float]
    segment_bytes: list[int]
    cached_bytes: list[int]
    working_bytes: list[int]
    result_bytes: list[int]


def worker(watched: Watched) -> Worker:
    """A worker for /api/v1/workers. One that never answered has zeros."""
    found = watched.telemetry
    memory = found.memory if found else None
    return Worker(
        address=watched.address.text,
        state=watched.state,
        error=watched.error,
        seen_at_s=watched.answered_at_s,
        version=found.worker_version if found else "",
        device=found.device if found else "",
        uptime_s=found.uptime_s if found else 0.0,
        memory=Memory(**{name: getattr(memory, name) if memory else 0 for name in Memory.model_fields}),
        sessions=[
            Session(trainer=s.trainer, segments=s.segments, idle_s=s.idle_s, drift=s.drift)
            for s in (found.sessions if found else ())
        ],
        rpcs=[
            Rpc(method=r.method, calls=r.calls, errors=r.errors, p50_s=r.p50_s, p90_s=r.p90_s, p99_s=r.p99_s)
            for r in (found.rpcs if found else ())
        ],
        recomputed_segments=found.recomputed_segments if found else 0,
        received_bytes=found.received_bytes if found else 0,
        sent_bytes=found.sent_bytes if found else 0,
        queued_requests=found.queued_requests if found else 0,
    )


def memory_history(watched: Watched, samples: int) -> MemoryHistory:
    """The last samples of a worker's memory."""
    last = list(watched.memory)[-samples:]
    return MemoryHistory(
        address=watched.address.text,
        budget_bytes=watched.telemetry.memory.budget_bytes if watched.telemetry else 0,
        at_s=[sample.at_s for sample in last],
        segment_bytes=[sample.segments for sample in last],
        cached_bytes=[sample.cached for sample in last],
        working_bytes=[sample.working for sample in last],
        result_bytes=[sample.results for sample in last],
    )
