"""Training runs and their steps."""

from typing import Literal

from pydantic import Field

from backhaul_server.dashboard.schemas import fields
from backhaul_server.dashboard.schemas.base import Schema

Bottleneck = Literal["the trainer", "the workers", "the network", "the workers or the network", "the workers' queues"]


class RunVerdict(Schema):
    """Whether workers were worth it for a run, compared with recomputing the same segments on the trainer."""

    sentence: str = Field(
        description="What the run saved, what that cost, and whether it was worth it, in one sentence",
        examples=[
            "25 % less memory than without checkpointing (223 MiB). Steps 250 ms shorter than with torch's checkpoint. "
            "Bottleneck: the network"
        ],
    )
    saved_share: float | None = Field(
        description="Saved bytes as a share of the peak without Backhaul, from 0 to 1; null if the peak is unknown",
        examples=[0.25],
    )
    saved_bytes: int = Field(
        description="Bytes that autograd saved in segments and the trainer did not keep, at the largest",
        examples=[233_700_000],
    )
    added_ms: float | None = Field(
        description="Time that workers added to a step in the mean: waiting and overhead; null if unknown",
        examples=[188.5],
    )
    spared_ms: float | None = Field(
        description="Time per step in the mean that the trainer would have needed for what workers did: for the "
        "recomputation, and for the backward where workers return gradients; null if unknown",
        examples=[194.5],
    )
    is_worth_it: bool | None = Field(
        description="Whether it was worth it; null if too little was measured so far", examples=[True]
    )
    why: str = Field(
        description="Why it was not worth it, or is not known yet; empty if it was worth it", examples=[""]
    )
    bottleneck: Literal["", Bottleneck] = Field(
        description="What causes most of the time that workers add to a step; empty while no worker has recomputed",
        examples=["the network"],
    )
    values: str = Field(
        "",
        description="Whether values of workers have the bits of those of forward, or how far they are apart; empty if "
        "the trainer has not reported it to this dashboard",
        examples=["Workers' values are within 2e-6 of those of forward, wherever they were compared"],
    )


class RunSummary(Schema):
    """A training run, from connect() to close()."""

    id: str = Field(description="The id of the run as a node of /api/v1/topology", examples=["run:9f86d081884c7d65"])
    run: fields.RunId
    name: fields.RunName
    tags: list[str] = Field(description="Tags of the run, at most 16", examples=[["lora", "32k"]])
    notes: str = Field(
        description="Notes on the run, at most 2,000 characters; may be empty", examples=["with rank 16"]
    )
    rank: fields.Rank
    world_size: int = Field(
        description="Number of trainers of the training; 0 if torch.distributed is not used", examples=[2]
    )
    trainer: fields.Trainer
    client_version: fields.ClientVersion
    workers: list[str] = Field(
        description="Addresses of the workers that connect() was given",
        examples=[["127.0.0.1:50051", "127.0.0.1:50052"]],
    )
    started_at_s: float = Field(description="When connect() returned", examples=[1763768640.0])
    heard_at_s: float = Field(description="When the trainer was last heard", examples=[1763769599.6])
    state: fields.RunState
    settings: dict[str, str] = Field(
        description="Settings of the session by name; none is secret",
        examples=[{"returns": "auto", "numerics": "auto"}],
    )
    fingerprint: dict[str, str] = Field(
        description="What the trainer's numbers depend on, such as the version of torch",
        examples=[{"torch": "2.13.0+cpu", "cpu": "AVX512"}],
    )
    steps: int = Field(description="Number of reported steps", examples=[1_044])
    last_step: int = Field(description="Number of the last step", examples=[1_043])
    last_loss: float | None = Field(description="Loss of the last step that had one; null if none had", examples=[2.71])
    median_step_ms: float | None = Field(description="Median time of the last 50 steps", examples=[902.4])
    peak_bytes: int = Field(description="Peak memory of the trainer", examples=[702_545_920])
    up_bytes: fields.UpBytes
    down_bytes: fields.DownBytes
    fallbacks: fields.Fallbacks
    spared_bytes: int = Field(
        description="Bytes of parameters that were not sent, because only their differences were", examples=[0]
    )
    verdict: RunVerdict = Field(description="Whether workers were worth it for this run, and why not if they were not")


class RunSeries(Schema):
    """The steps of a run. A point for several steps has their median time and loss, and their largest bytes."""

    run: fields.RunId
    step: list[int] = Field(description="Number of the last step of each point", examples=[[1_042, 1_043]])
    at_s: list[float] = Field(
        description="When the last step of each point ended", examples=[[1763769598.7, 1763769599.6]]
    )
    step_ms: list[float] = Field(description="Median duration of the steps of each point", examples=[[905.1, 902.4]])
    peak_bytes: list[int] = Field(
        description="Largest peak memory of the trainer", examples=[[702_545_920, 702_545_920]]
    )
    moved_bytes: list[int] = Field(description="Bytes sent and received in a step", examples=[[63_522_734, 63_522_734]])
    loss: list[float | None] = Field(
        description="Median loss of the steps of each point; null where none was reported", examples=[[2.73, 2.71]]
    )
