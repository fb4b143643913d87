"""Compares the upload of 16 MiB tensors through shared memory with one memcpy of the same bytes.

The worker runs on the same host and uses the tensors in place.
"""

import ctypes

import torch
from torch import Tensor

from backhaul_lab.bench.outcomes import Outcome, of_rounds
from backhaul_lab.bench.transfers import with_spans
from backhaul_lab.harness.core_times import settle
from backhaul_lab.harness.rounds import Alternative, Plan, interleave, ratio_of
from backhaul_lab.harness.stage import Stage
from backhaul_lab.harness.training import compare_gradients

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
    # Autograd saves this one number instead of a tensor, and only the weights have gradients.
    scale = torch.tensor(2.0)

    def scaled() -> Tensor:
        settle(stage.cores)  # The predicted upload ends before forward begins, so neither slows the other.
        return torch.stack([(x * scale).sum() for x in weights]).sum()

    def there_and_back() -> None:
        for _ in range(REPEATS):
            with torch.no_grad():
                for x in weights:
                    x.add_(1.0)  # New contents, because the worker already stores the old ones.
                    x.grad = None
            y: Tensor = session.checkpoint(scaled)
            settle(stage.cores)
            y.backward()  # type: ignore[no-untyped-call]
            gradients = [x.grad for x in weights if x.grad is not None]
            compare_gradients("the transfer", gradients, [torch.full_like(x, 2.0) for x in weights])

    def memcpy() -> None:
        for _ in range(REPEATS):
            for x, copy in zip(weights, copies, strict=True):
                ctypes.memmove(copy.data_ptr(), x.data_ptr(), TENSOR_BYTES)

    variants = [Alternative("backhaul", there_and_back), Alternative("memcpy", memcpy)]
    rounds = with_spans(interleave(variants, stage.cores, PLAN), session.workers, PLAN.warm, REPEATS)
    note = "upload only, used in place; details.fetch is the time to copy gradients out of shared memory"
    return [of_rounds("shm_vs_memcpy", rounds, ratio_of("memcpy", "save"), note)]
