"""Models and segments whose tensors are on two devices of the trainer."""

import copy
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import cast

import pytest
import torch
from torch import Tensor, nn

import backhaul
from backhaul import Session
from conftest import QUIET_S
from support.bits import Checkpoint, differing, grad_of, plainly
from support.lanes import counted
from support.processes import WorkerProcess

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
WIDTH = 16


@pytest.fixture(scope="module")
def gpu_worker() -> Iterator[WorkerProcess]:
    with WorkerProcess("--memory", "1GiB", "--device", "cuda") as process:
        yield process


def synchronize() -> None:
    for index in range(torch.cuda.device_count()):
        torch.cuda.synchronize(index)


def build(*devices: str) -> nn.ModuleList:
    """Layers on different devices, as `device_map` of transformers and accelerate places them."""
    torch.manual_seed(0)
    return nn.ModuleList(nn.Linear(WIDTH, WIDTH).to(device) for device in devices)


def loss_of(checkpoint: Checkpoint, layers: Iterable[nn.Module], x: Tensor) -> Tensor:
    for layer in layers:
        x = checkpoint(layer, x.to(cast(nn.Linear, layer).weight.device))
    return x.square().sum()


def gradients(
    layers: nn.ModuleList, losses: Callable[[Checkpoint], Iterator[Tensor]], session: Session | None
) -> list[Tensor]:
    """Trains on each loss, in a block if there is a session."""
    if session is None:
        for loss in losses(plainly):
            loss.backward()
    else:
        session._shares["recompute"].trainers_share = lambda: 0  # type: ignore[method-assign]
        with session.accumulate() as step:
            for loss in losses(session.checkpoint):
                step.backward(loss)
        assert session.report().fallbacks == 0
    synchronize()
    return [grad_of(parameter).cpu() for parameter in layers.parameters()]


def test_sums_of_a_block_go_to_the_devices_of_their_parameters(gpu_worker: WorkerProcess) -> None:
    layers = build("cuda:0", "cuda:0", "cuda:1", "cuda:1")
    twin, x = copy.deepcopy(layers), torch.randn(4, WIDTH)

    def losses(layers: nn.ModuleList, checkpoint: Checkpoint) -> Iterator[Tensor]:
        for part in (layers[:2], layers[2:], layers[:2], layers[2:]):
            yield loss_of(checkpoint, part, x)

    with counted() as passed, backhaul.connect(gpu_worker.address, silence_s=QUIET_S) as session:
        ours = gradients(layers, partial(losses, layers), session)
    assert passed["CollectGradients"] > 0
    assert differing(ours, gradients(twin, partial(losses, twin), None)) == []


def test_a_block_continues_on_the_stream_of_another_device_than_its_loss(gpu_worker: WorkerProcess) -> None:
    layers = build("cuda:0", "cuda:0")
    twin, x = copy.deepcopy(layers), torch.randn(4, WIDTH)

    def losses(layers: nn.ModuleList, checkpoint: Checkpoint) -> Iterator[Tensor]:
        for number in range(3):
            yield loss_of(checkpoint, layers, number * x).to("cuda:1")

    synchronize()
    with (
        backhaul.connect(gpu_worker.address, silence_s=QUIET_S) as session,
        torch.cuda.stream(torch.cuda.Stream("cuda:0")),
        torch.cuda.stream(torch.cuda.Stream("cuda:1")),
    ):
        ours = gradients(layers, partial(losses, layers), session)
    assert differing(ours, gradients(twin, partial(losses, twin), None)) == []
