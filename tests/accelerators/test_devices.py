"""Trainers beside an accelerator that they do not use, and models on two of them."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import backhaul
from backhaul import Session
from conftest import QUIET
from support.bits import Checkpoint, differing, plainly, seed_generators
from support.processes import WorkerProcess

pytestmark = pytest.mark.slow


@pytest.fixture
def on_gpu() -> Iterator[Session]:
    worker = WorkerProcess("--memory", "1GiB", "--device", "cuda")
    with worker, backhaul.connect(worker.address, settings=QUIET) as session:
        yield session


def gradients(checkpoint: Checkpoint, *devices: str) -> list[Tensor | None]:
    """Returns those of two steps of a model with a layer on each device."""
    seed_generators(0)
    layers = [nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.2)).to(device) for device in devices]
    made: list[Tensor | None] = []
    for _ in range(2):
        h = torch.randn(4, 16)
        for layer, device in zip(layers, devices, strict=True):
            h = checkpoint(layer, h.to(device))
        h.square().sum().backward()
        made += [None if p.grad is None else p.grad.clone() for layer in layers for p in layer.parameters()]
    return made


def test_a_trainer_on_the_cpu_with_a_worker_of_its_own() -> None:
    with backhaul.connect(strict=True, settings=QUIET) as session:
        assert differing(gradients(session.checkpoint, "cpu", "cpu"), gradients(plainly, "cpu", "cpu")) == []
        assert session.report().remote == 4


def test_a_trainer_on_the_cpu_beside_a_worker_on_a_gpu(on_gpu: Session, returns: str) -> None:
    def checkpoint(layer: nn.Module, h: Tensor) -> Tensor:
        result: Tensor = on_gpu.checkpoint(layer, h, returns=returns)
        return result

    assert differing(gradients(checkpoint, "cpu", "cpu"), gradients(plainly, "cpu", "cpu")) == []
    assert on_gpu.report().remote == 0


def test_a_model_on_two_devices(on_gpu: Session) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    devices = ("cuda:0", "cuda:1", "cuda:0")
    assert differing(gradients(on_gpu.checkpoint, *devices), gradients(plainly, *devices)) == []
    assert on_gpu.report().remote == 6
