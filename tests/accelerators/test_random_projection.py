"""Random projections of tensors on a CUDA device."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from backhaul_runtime.tensors.random_projection import SIZE, drift, projections, read_projections, unread_projections


def values(size: int = 600_000) -> Tensor:
    """More values than one chunk on the host has, some of which are not finite."""
    tensor = torch.randn(size)
    tensor[[1, 300_000]] = torch.tensor([math.inf, math.nan])
    return tensor


def test_a_device_and_the_host_agree() -> None:
    tensors = [values(), torch.randn(7, dtype=torch.float64), torch.arange(3), torch.randn(5, dtype=torch.complex64)]
    here, there = projections(tensors), projections([tensor.cuda() for tensor in tensors])
    assert len(here) == 3 * SIZE
    assert drift(here, there) < 1e-12  # the sums are rounded in another order
    assert there[0] == 2


@pytest.mark.parametrize("count", [1, 3])
def test_all_projections_wait_once(simulation: Any, count: int) -> None:
    tensors = [values().cuda() for _ in range(count)]
    simulation.reset_counters()
    unread = [unread_projections([tensor]) for tensor in tensors]
    assert simulation.counters()["syncs"] == 0
    read_projections(unread)
    assert simulation.counters()["syncs"] == 1
