"""Who is connected with whom, and the memory and load of all workers at once."""

from typing import Literal

from pydantic import Field

from backhaul_server.dashboard.schemas import fields
from backhaul_server.dashboard.schemas.base import Schema
from backhaul_server.dashboard.schemas.now import AcceleratorStatus, State

NodeState = Literal["serving", "draining", "unreachable", "unwatched", "running", "silent", "lost", "ended"]
LinkState = Literal["active", "idle", "broken"]


def worker_id(address: str) -> str:
    """Returns the id of a worker's node."""
    return f"worker:{address}"


def run_id(run: str) -> str:
    """Returns the id of a trainer's node."""
    return f"run:{run}"


class TopologyNode(Schema):
    """A trainer or a worker."""

    id: str = Field(
        description="A name that stays the same: worker:ADDRESS or run:RUN", examples=["worker:127.0.0.1:50051"]
    )
    kind: Literal["trainer", "worker"] = Field(description="Whether it trains or recomputes", examples=["worker"])
    label: str = Field(
        description="What to call it: an address, or the name or trainer of a run", examples=["127.0.0.1:50051"]
    )
    state: NodeState = Field(
        description="Of a worker: serving, draining, unreachable, or unwatched (a trainer names it, but the dashboard "
        "does not watch it). Of a trainer: running, silent (not heard for 30 seconds), lost (for 5 minutes) or ended",
        examples=["serving"],
    )
    seen_at_s: float = Field(
        description="When a worker last answered the dashboard, or a trainer was last heard; 0 if the dashboard never "
        "heard of it itself",
        examples=[1763769599.6],
    )
    run: str = Field(description="Id of the run of a trainer; empty for a worker", examples=[""])
    rank: int = Field(description="Rank of a trainer; 0 if it trains alone, and for a worker", examples=[0])
    world_size: int = Field(
        description="Number of trainers of the training; 0 if it does not use torch.distributed, and for a worker",
        examples=[0],
    )


class TopologyLink(Schema):
    """The connection of a trainer to a worker."""

    id: str = Field(
        description="A name that stays the same: those of both nodes",
        examples=["run:9f86d081884c7d65 worker:127.0.0.1:50051"],
    )
    trainer: str = Field(description="Id of the trainer's node", examples=["run:9f86d081884c7d65"])
    worker: str = Field(description="Id of the worker's node", examples=["worker:127.0.0.1:50051"])
    up_bytes_per_s: float | None = Field(
        description="Bytes per second from trainer to worker over the last 10 seconds; null if the trainer does not "
        "report its links, or if the worker is unreachable and no report arrived in that time",
        examples=[11_500_000.0],
    )
    down_bytes_per_s: float | None = Field(
        description="Bytes per second from worker to trainer over the last 10 seconds; null as for `up_bytes_per_s`",
        examples=[9_800_000.0],
    )
    up_bytes: int | None = Field(
        description="Bytes from trainer to worker since the run began; null if unknown", examples=[17_301_504_000]
    )
    down_bytes: int | None = Field(
        description="Bytes from worker to trainer since the run began; null if unknown", examples=[17_249_075_200]
    )
    round_trip_ms: fields.RoundTripMs
    clock_offset_ms: fields.ClockOffsetMs
    clock_error_ms: fields.ClockErrorMs
    measured_at_s: float | None = Field(
        description="When the trainer's last report on the link arrived, from which the other values are; null if "
        "there was none",
        examples=[1763769599.0],
    )
    state: LinkState = Field(
        description="active: bytes moved in the last 10 seconds. broken: the trainer has lost the worker, or the "
        "worker is unreachable",
        examples=["active"],
    )


class Topology(Schema):
    """Trainers, workers and the connections between them."""

    at_s: fields.Now
    nodes: list[TopologyNode] = Field(description="All workers, and all runs that are not over or ended lately")
    links: list[TopologyLink] = Field(description="The connections between these nodes")


class FleetMember(Schema):
    """One worker over time. Its lists are as long as the `at_s` of the fleet."""

    id: str = Field(description="A name that stays the same", examples=["worker:127.0.0.1:50051"])
    address: fields.WatchedAddress
    state: State = Field(description="What the worker does now", examples=["serving"])
    seen_at_s: fields.WorkerSeen
    memory_share: list[float | None] = Field(
        description="Largest share of its budget in use, from 0 to 1, by interval; null without a sample",
        examples=[[0.31, 0.33]],
    )
    load: list[float | None] = Field(
        description="Mean share of the time in which it computed, from 0 to 1, by interval; null without a sample",
        examples=[[0.61, 0.58]],
    )
    sessions: int | None = Field(
        description="Number of open sessions now; null while the worker is unreachable", examples=[1]
    )
    queued_requests: int | None = Field(
        description="Requests that wait or run now; null while the worker is unreachable", examples=[1]
    )
    accelerator: AcceleratorStatus | None = Field(
        description="Its GPU now; null if it has none, if the extra nvml is not installed on it, or while the worker "
        "is unreachable"
    )


class Fleet(Schema):
    """The memory and load of all workers over time."""

    at_s: list[float] = Field(description="Start of each interval", examples=[[1763769590.0, 1763769600.0]])
    interval_s: float = Field(description="Seconds that each interval covers", examples=[10.0])
    workers: list[FleetMember] = Field(description="All workers, in the order of the command line")
