"""What takes too long or too much memory for every commit: `make soak`."""

import pytest
import torch

import backhaul
from support.bits import Checkpoint, grad_of, plainly
from support.processes import WorkerProcess

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]


def test_a_tensor_of_three_gibibytes_travels() -> None:
    # Trainer and worker take 10 GiB each: the tensor, its copy or square, its gradient.
    with (
        WorkerProcess("--memory", "16GiB") as worker,
        backhaul.connect(worker.address, settings=backhaul.Settings(silence_s=240)) as session,
    ):
        size = (3 << 30) // 4

        def step(checkpoint: Checkpoint) -> tuple[float, float]:
            x = torch.arange(size, dtype=torch.float32).mul_(1e-9).requires_grad_()
            loss = checkpoint(_sum_of_squares, x)
            loss.backward()
            return loss.item(), grad_of(x)[-1].item()

        expected = step(plainly)
        assert step(lambda fn, x: session.checkpoint(fn, x, returns="gradients")) == expected
        assert session.report().remote == 1
        assert session.report().up_bytes > 3 << 30
        assert session.report().down_bytes > 3 << 30


def _sum_of_squares(x: torch.Tensor) -> torch.Tensor:
    return x.square().sum()
