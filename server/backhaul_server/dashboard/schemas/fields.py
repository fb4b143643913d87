"""Fields that many answers have, each described once."""

from typing import Annotated, Literal

from pydantic import Field

RunId = Annotated[str, Field(description="Id of the training run", examples=["9f86d081884c7d65"])]
RunName = Annotated[
    str, Field(description="What people call the run, as connect(run=...) says; may be empty", examples=["lora-32k"])
]
Trainer = Annotated[str, Field(description="Host and process of the trainer", examples=["gpu-box:4711"])]
ClientVersion = Annotated[str, Field(description="Version of Backhaul on the trainer", examples=["0.1.0"])]
RunState = Annotated[
    Literal["running", "silent", "lost", "ended"],
    Field(
        description="running, or ended by close(). silent: no report has arrived for 30 seconds, or none can, because "
        "no worker of the run answers. lost: none has arrived for 5 minutes",
        examples=["running"],
    ),
]
Rank = Annotated[int, Field(description="Rank of the trainer in its training; 0 if it trains alone", examples=[0])]
Segment = Annotated[
    str, Field(description="Name and position of the segment, as in the table of segments", examples=["Block #3"])
]
WorkerAddress = Annotated[str, Field(description="Address of the worker", examples=["127.0.0.1:50051"])]
WatchedAddress = Annotated[
    str, Field(description="Address of the worker, as the dashboard was given it", examples=["127.0.0.1:50051"])
]
WorkerSeen = Annotated[
    float, Field(description="When the worker last answered; 0 if it never has", examples=[1763769599.6])
]
Now = Annotated[
    float, Field(description="Time of the dashboard's clock when it made this answer", examples=[1763769600.0])
]
PointTimes = Annotated[list[float], Field(description="Times of the points", examples=[[1763769598.6, 1763769599.6]])]
UpBytes = Annotated[int, Field(description="Bytes sent to workers, by all calls together", examples=[5_577_572_352])]
DownBytes = Annotated[
    int, Field(description="Bytes received from workers, by all calls together", examples=[5_468_323_840])
]
Fallbacks = Annotated[
    int, Field(description="Segments that were meant for a worker but ran on the trainer", examples=[0])
]
IsFallback = Annotated[
    bool, Field(description="Whether it was meant for a worker but ran on the trainer", examples=[False])
]
Retries = Annotated[int, Field(description="Number of repeated requests", examples=[0])]
Mismatches = Annotated[int, Field(description="Recomputations whose values the trainer rejected", examples=[0])]
Drift = Annotated[
    float,
    Field(
        description="Largest relative difference between recomputed and original values; 0 if all bits are equal",
        examples=[0.0],
    ),
]
RoundTripMs = Annotated[
    float | None, Field(description="Shortest of the last round trips; null if unknown", examples=[0.35])
]
ClockOffsetMs = Annotated[
    float | None, Field(description="The worker's clock minus the trainer's; null if unknown", examples=[12.4])
]
ClockErrorMs = Annotated[
    float | None,
    Field(
        description="Largest possible error of the offset, and so of the place of this worker's bars beside the "
        "trainer's; null if unknown",
        examples=[0.2],
    ),
]
