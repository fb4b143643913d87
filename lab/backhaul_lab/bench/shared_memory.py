"""Compares the upload of 16 MiB tensors through shared memory with one memcpy of the same bytes.

The worker runs on the same host and uses the tensors in place.
"""

import ctypes

import torch

from backhaul_lab.bench.outcomes import Outcome, of_rounds
from backhaul_lab.bench.transfers import there_and_back, with_spans
from backhaul_lab.harness.rounds import Alternative, Plan, interleave, ratio_of
from backhaul_lab.harness.stage import Stage

TENSOR_BYTES = 16 << 20
TENSORS = 8
REPEATS = 4
"""Uploads timed together, because one alone is too short to detect disturbances."""
PLAN = Plan(most=20, warm=3, limit_s=30.0)


def measure(stage: Stage) -> list[Outcome]:
    """Measures the figure shm_vs_memcpy."""
    session = stage.session(returns="gradients")
    weights = [torch.randn(TENSOR_BYTES // 4, requires_grad=True) for _ in range(TENSORS)]
    copies = [torch.empty_like(x, requires_grad=False).zero_() for x in weights]

    def memcpy() -> None:
        for _ in range(REPEATS):
            for x, copy in zip(weights, copies, strict=True):
                ctypes.memmove(copy.data_ptr(), x.data_ptr(), TENSOR_BYTES)

    transfer = there_and_back(session, weights, stage.cores, REPEATS)
    variants = [Alternative("backhaul", transfer), Alternative("memcpy", memcpy)]
    rounds = with_spans(interleave(variants, stage.cores, PLAN), session.workers, PLAN.warm, REPEATS)
    note = "upload only, used in place; details.fetch is the time to copy gradients out of shared memory"
    return [of_rounds("shm_vs_memcpy", rounds, ratio_of("memcpy", "save"), note)]
