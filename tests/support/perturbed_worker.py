"""A worker whose arithmetic is off by a little: run it as `backhaul` is run."""

import sys
from typing import Any

import torch

from backhaul._cli.main import main
from backhaul_runtime.replay.replay import Replay

_results = Replay._results


def perturbed(self: Replay, op: Any, node: Any, *given: Any) -> list[torch.Tensor]:
    """What linear layers give, times numbers near one, so that near ties turn."""
    results = _results(self, op, node, *given)
    if node.op == "aten.linear.default":
        generator = torch.Generator().manual_seed(0)
        results[0].data.mul_(1 + 1e-6 * torch.randn(results[0].shape, generator=generator))
    return results


setattr(Replay, "_results", perturbed)  # noqa: B010 (mypy rejects an assignment to a method)
sys.exit(main())
