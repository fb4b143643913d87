"""Costs of a segment, as `backhaul simulate` measures them, for tests of predictions."""

from backhaul.simulate.costs import Costs
from backhaul_runtime.replay.schedule import Footprint

COSTS = Costs(
    forward_s=0.18,
    backward_s=0.24,
    optimizer_s=0.01,
    record_s=0.02,
    upload_s=0.006,
    ingest_s=0.007,
    replay_s=0.18,
    replay_backward_s=0.21,
    answer_s=0.009,
    finish_s=0.012,
    weight_bytes=12_600_000,
    boundary_bytes=2_100_000,
    footprint=Footprint(90_000_000, 88_000_000, 100_000_000),
)
"""Costs about as large as those of a block of width 512 with 1,024 tokens on one core."""
