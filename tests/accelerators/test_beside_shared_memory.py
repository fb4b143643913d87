"""Tensors on a GPU, which cannot go through the memory that a session shares with a worker on the same machine."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import backhaul
from conftest import QUIET
from support.bits import grad_of, plainly
from support.flips import counted
from support.processes import WorkerProcess

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def gpu_worker() -> Iterator[WorkerProcess]:
    with WorkerProcess("--memory", "1GiB", "--device", "cuda") as process:
        yield process


def test_tensors_on_a_gpu_travel_in_messages(gpu_worker: WorkerProcess, returns: str) -> None:
    def saves_twice(x: Tensor) -> Tensor:
        return x.sin().exp()

    x = torch.randn(2 << 20, device="cuda", requires_grad=True)
    (expected,) = torch.autograd.grad(saves_twice(x).sum(), x)
    with counted() as passed, backhaul.connect(gpu_worker.address, settings=QUIET) as session:
        (handle,) = session._workers[:]
        assert handle.connection.up is not None
        assert handle.connection.up.memory is not None
        session.checkpoint(saves_twice, x, returns=returns, strict=True).sum().backward()
        assert torch.equal(grad_of(x), expected)
    assert passed["PutTensors"] > 8  # MiB of the input alone


def test_a_weight_on_the_host_goes_beside_them(gpu_worker: WorkerProcess, returns: str) -> None:
    def gradients(checkpoint: Callable[..., Tensor]) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(1 << 20, generator=generator).requires_grad_()
        x = torch.randn(1 << 20, generator=generator).cuda().requires_grad_()
        checkpoint(lambda x: (x * weight.to(x.device)).sin(), x).sum().backward()
        return [grad_of(weight), grad_of(x).cpu()]

    with backhaul.connect(gpu_worker.address, settings=QUIET) as session:
        ours = gradients(lambda *args: session.checkpoint(*args, returns=returns, strict=True))
        assert session.report().fallbacks == 0
    for one, other in zip(ours, gradients(plainly), strict=True):
        assert torch.equal(one, other)


def test_sums_of_a_block_travel_in_messages(gpu_worker: WorkerProcess) -> None:
    with counted() as passed, backhaul.connect(gpu_worker.address, settings=QUIET) as session:
        session._shares["recompute"].trainers_share = lambda: 0  # type: ignore[method-assign]
        weight = torch.nn.Parameter(torch.ones(2 << 20, device="cuda"))
        with session.accumulate() as step:
            for number in (1.0, 2.0):
                scale = torch.full((1,), number, device="cuda")
                step.backward(session.checkpoint(lambda scale: weight * scale, scale).sum())
        assert torch.equal(grad_of(weight), torch.full_like(weight, 3.0))
        assert session.report().fallbacks == 0
    assert passed["collect_gradients"] + passed["tensors"] > 8
