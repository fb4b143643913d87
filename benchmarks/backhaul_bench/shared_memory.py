"""Tensors of 16 MiB to a worker on the same host, which uses them in place, beside one memcpy of the same bytes."""

import ctypes

import torch
from torch import Tensor

from backhaul_bench.noise import settle
from backhaul_bench.outcomes import Outcome, of_rounds
from backhaul_bench.rounds import Alternative, Plan, interleave, ratio_of
from backhaul_bench.stage import Stage
from backhaul_bench.training import compare_gradients
from backhaul_bench.transfers import with_spans

TENSOR_BYTES = 16 << 20
TENSORS = 8
REPEATS = 4
"""Uploads timed together: one alone is too short to tell whether it was disturbed."""
PLAN = Plan(most=20, warm=3, limit_s=30.0)


def measure(stage: Stage) -> list[Outcome]:
    """shm_vs_memcpy."""
    session = stage.session(returns="gradients")
    weights = [torch.randn(TENSOR_BYTES // 4, requires_grad=True) for _ in range(TENSORS)]
    copies = [torch.empty_like(x, requires_grad=False).zero_() for x in weights]
    # It is needed and not trained, so that nothing but the weights has a gradient: autograd saves one number.
    scale = torch.tensor(2.0)

    def scaled() -> Tensor:
        settle(stage.cores)  # what was predicted is sent beside forward: here neither slows the other
        return torch.stack([(x * scale).sum() for x in weights]).sum()

    def there_and_back() -> None:
        for _ in range(REPEATS):
            with torch.no_grad():
                for x in weights:
                    x.add_(1.0)  # other contents, or they need not travel
                    x.grad = None
            y: Tensor = session.checkpoint(scaled)
            settle(stage.cores)
            y.backward()  # type: ignore[no-untyped-call]
            found = [x.grad for x in weights if x.grad is not None]
            compare_gradients("the transfer", found, [torch.full_like(x, 2.0) for x in weights])

    def memcpy() -> None:
        for _ in range(REPEATS):
            for x, copy in zip(weights, copies, strict=True):
                ctypes.memmove(copy.data_ptr(), x.data_ptr(), TENSOR_BYTES)

    variants = [Alternative("backhaul", there_and_back), Alternative("memcpy", memcpy)]
    rounds = with_spans(interleave(variants, stage.cores, PLAN), session.workers, PLAN.warm, REPEATS)
    note = "up, in place; gradients are copied out of shared memory, which takes details.fetch"
    return [of_rounds("shm_vs_memcpy", rounds, ratio_of("memcpy", "save"), note)]
