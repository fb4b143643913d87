"""What takes too long or too much memory for every commit: `make soak`."""

import pytest
import torch

import backhaul
from support.bits import plainly
from support.processes import WorkerProcess

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]


def test_a_tensor_of_three_gibibytes_travels() -> None:
    with WorkerProcess("--memory", "16GiB") as worker, backhaul.connect(worker.address, silence_s=60.0) as session:
        size = (3 << 30) // 4

        def step(checkpoint: object) -> tuple[float, float]:
            x = torch.arange(size, dtype=torch.float32).mul_(1e-9).requires_grad_()
            y = checkpoint(torch.tanh, x)
            y[-1].backward()
            return y[-1].item(), x.grad[-1].item()

        expected = step(plainly)
        assert step(lambda fn, x: session.checkpoint(fn, x, returns="gradients")) == expected
        assert session.report().remote == 1
        assert session.report().up_bytes > 2 * (3 << 30)
