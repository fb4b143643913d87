"""Workers on an accelerator that run out of memory or die: the trainer's gradients are those without checkpointing."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import backhaul
from backhaul import Session
from backhaul._accumulate.block import AccumulationBlock
from conftest import QUIET
from faults.test_worker_dies import train_through
from support.bits import differing, plainly
from support.blocks import train, trained
from support.calls import sines
from support.devices import IS_SIMULATED
from support.processes import WorkerProcess

pytestmark = pytest.mark.slow

DEVICE_BYTES, ROWS, WIDTH = 24 << 20, 256, 256


@pytest.fixture
def on_a_small_gpu() -> Iterator[Session]:
    """A session on a worker whose budget has room for what its device has none for."""
    if not IS_SIMULATED:
        pytest.skip("the simulated device has as little memory as a test wants")
    environment = {"SIMULATED_CUDA_BYTES": str(DEVICE_BYTES)}
    worker = WorkerProcess("--memory", "1GiB", "--device", "cuda", environment=environment)
    with worker, backhaul.connect(worker.address, settings=QUIET) as session:
        yield session


@pytest.fixture
def gpu_worker() -> Iterator[WorkerProcess]:
    with WorkerProcess("--memory", "1GiB", "--device", "cuda") as process:
        yield process


def wide(x: Tensor) -> Tensor:
    """Needs 48 MiB for an x of 256 KiB."""
    return x.repeat(2 * DEVICE_BYTES // x.nbytes, 1).sin().sum(0)


@pytest.mark.parametrize(
    ("function", "rows"),
    [(wide, ROWS), (sines, 2 * DEVICE_BYTES // (4 * WIDTH))],
    ids=["while a segment runs", "while a tensor arrives"],
)
def test_a_worker_out_of_memory_serves_on(
    on_a_small_gpu: Session, returns: str, function: Callable[[Tensor], Tensor], rows: int
) -> None:
    def is_right(function: Callable[[Tensor], Tensor], rows: int) -> bool:
        x = torch.linspace(-1, 1, rows * WIDTH, device="cuda").view(rows, WIDTH).requires_grad_()
        on_a_small_gpu.checkpoint(function, x, returns=returns).sum().backward()
        (expected,) = torch.autograd.grad(function(x).sum(), x)
        return x.grad is not None and torch.equal(x.grad, expected)

    assert all(is_right(function, rows) for _ in range(3))  # the later calls are predicted
    assert (on_a_small_gpu.report().remote, on_a_small_gpu.report().fallbacks) == (0, 3)
    assert is_right(sines, ROWS)
    assert on_a_small_gpu.report().remote == 1


def test_a_worker_killed_in_backward(gpu_worker: WorkerProcess, returns: str) -> None:
    with torch.device("cuda"), backhaul.connect(gpu_worker.address, settings=QUIET) as session:
        train_through(session, returns, "backward", gpu_worker.kill)
        assert session.report().fallbacks > 0


@pytest.mark.parametrize("at", [0, 2])
def test_a_worker_killed_in_a_block(gpu_worker: WorkerProcess, at: int) -> None:
    def happen(number: int, block: Any) -> None:
        if number == at and isinstance(block, AccumulationBlock) and gpu_worker.process.poll() is None:
            gpu_worker.kill()

    with torch.device("cuda"), backhaul.connect(gpu_worker.address, settings=QUIET) as session:
        ours = trained(session, micro_batches=4, happen=happen)
        assert differing(ours, train(plainly, micro_batches=4)) == []
        assert session.report().fallbacks > 0
