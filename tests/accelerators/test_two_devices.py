"""Models and segments whose tensors are on two devices of the trainer: two GPUs, or a GPU and the host."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import cast

import pytest
import torch
from torch import Tensor, nn

import backhaul
from backhaul import Session
from backhaul._backward.lineage import as_it_was
from backhaul._dispatch import dispatcher
from backhaul_runtime.process.fingerprint import fingerprint_with_host
from backhaul_runtime.record.recording import RecordedSource, Recording
from backhaul_runtime.tensors.digest import address_of
from backhaul_runtime.tensors.layout import layout_of
from conftest import QUIET
from support.bits import Checkpoint, differing, grad_of, plainly
from support.flips import counted
from support.processes import WorkerProcess

pytestmark = pytest.mark.slow
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
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


@needs_two
def test_sums_of_a_block_go_to_the_devices_of_their_parameters(gpu_worker: WorkerProcess) -> None:
    layers = build("cuda:0", "cuda:0", "cuda:1", "cuda:1")
    twin, x = copy.deepcopy(layers), torch.randn(4, WIDTH)

    def losses(layers: nn.ModuleList, checkpoint: Checkpoint) -> Iterator[Tensor]:
        for part in (layers[:2], layers[2:], layers[:2], layers[2:]):
            yield loss_of(checkpoint, part, x)

    with counted() as passed, backhaul.connect(gpu_worker.address, settings=QUIET) as session:
        ours = gradients(layers, partial(losses, layers), session)
    assert passed["collect_gradients"] > 0
    assert differing(ours, gradients(twin, partial(losses, twin), None)) == []


@needs_two
def test_a_block_continues_on_the_stream_of_another_device_than_its_loss(gpu_worker: WorkerProcess) -> None:
    layers = build("cuda:0", "cuda:0")
    twin, x = copy.deepcopy(layers), torch.randn(4, WIDTH)

    def losses(layers: nn.ModuleList, checkpoint: Checkpoint) -> Iterator[Tensor]:
        for number in range(3):
            yield loss_of(checkpoint, layers, number * x).to("cuda:1")

    synchronize()
    with (
        backhaul.connect(gpu_worker.address, settings=QUIET) as session,
        torch.cuda.stream(torch.cuda.Stream("cuda:0")),
        torch.cuda.stream(torch.cuda.Stream("cuda:1")),
    ):
        ours = gradients(layers, partial(losses, layers), session)
    assert differing(ours, gradients(twin, partial(losses, twin), None)) == []


def moves(x: Tensor, weight: Tensor) -> Tensor:
    return (x * weight).to("cuda:1").sin()


def moves_back(x: Tensor, weight: Tensor) -> Tensor:
    return (x * weight).to("cuda:1").sin().to("cuda:0") * weight


def draws_on_both(x: Tensor, weight: Tensor) -> Tensor:
    moved = torch.dropout(torch.dropout(x * weight, 0.5, True).to("cuda:1"), 0.5, True)
    return torch.dropout(moved.to("cuda:0") * weight, 0.5, True)


def makes(x: Tensor, weight: Tensor) -> Tensor:
    return (x * weight).to("cuda:1") + torch.ones(4, WIDTH, device="cuda:1")


def makes_on_the_current_device(x: Tensor, weight: Tensor) -> Tensor:
    with torch.cuda.device(1):
        made = torch.ones(4, WIDTH, device="cuda").sin()
    return x * weight + made.to(x.device)


def draws_on_the_gpu(x: Tensor, weight: Tensor) -> Tensor:
    return torch.dropout((x * weight).cuda(), 0.5, True).sin().exp()


def after_a_step(checkpoint: Checkpoint, function: Callable[..., Tensor], device: str) -> list[Tensor]:
    """Returns the gradients and the output of a function, and what is drawn afterwards on each device."""
    torch.manual_seed(1)
    x, weight = torch.randn(4, WIDTH).to(device).requires_grad_(), torch.randn(WIDTH).to(device).requires_grad_()
    output = checkpoint(function, x, weight)
    output.square().sum().backward()
    devices = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    drawn = [torch.rand(3, device=device).cpu() for device in devices]
    synchronize()
    return [grad_of(x).cpu(), grad_of(weight).cpu(), output.detach().cpu(), *drawn]


@needs_two
@pytest.mark.parametrize("function", [moves, moves_back, draws_on_both, makes, makes_on_the_current_device])
def test_a_segment_on_two_gpus_stays_on_the_trainer(
    gpu_worker: WorkerProcess, function: Callable[..., Tensor], returns: str
) -> None:
    with backhaul.connect(gpu_worker.address, settings=QUIET) as session:
        for _ in range(2):
            ours = after_a_step(partial(session.checkpoint, returns=returns), function, "cuda:0")
            assert differing(ours, after_a_step(plainly, function, "cuda:0")) == []
        assert "on the trainer: its tensors are on several accelerators" in str(session.report())


def test_a_segment_that_moves_what_the_host_has_runs_on_the_gpu(gpu_worker: WorkerProcess, returns: str) -> None:
    with backhaul.connect(gpu_worker.address, settings=QUIET) as session:
        checkpoint = partial(session.checkpoint, returns=returns, strict=True)
        ours = after_a_step(checkpoint, draws_on_the_gpu, "cpu")
    assert differing(ours, after_a_step(plainly, draws_on_the_gpu, "cpu")) == []


def test_a_recomputation_on_the_trainer_leaves_the_generator_of_a_gpu_that_has_no_source(
    worker: WorkerProcess, returns: str
) -> None:
    with backhaul.connect(worker.address, settings=QUIET) as session:
        ours = after_a_step(partial(session.checkpoint, returns=returns), draws_on_the_gpu, "cpu")
        assert "device is cuda here and cpu there" in str(session.report())
    assert differing(ours, after_a_step(plainly, draws_on_the_gpu, "cpu")) == []


@needs_two
def test_a_prediction_takes_the_generator_of_its_tensors(gpu_worker: WorkerProcess) -> None:
    x = torch.randn(4, WIDTH, device="cuda:1", requires_grad=True)
    weight = torch.randn(WIDTH, device="cuda:1", requires_grad=True)

    def drop(x: Tensor) -> Tensor:
        return torch.dropout(x * weight, 0.5, True)

    wasted = gpu_worker.telemetry().speculation_misses
    with backhaul.connect(gpu_worker.address, settings=QUIET) as session:
        for _ in range(4):
            session.checkpoint(drop, x, strict=True).sum().backward()
            torch.rand(1, device="cuda:0")  # the current device, whose generator moves on alone
    assert gpu_worker.telemetry().speculation_misses == wasted


@needs_two
def test_a_boundary_that_was_fetched_goes_to_the_device_of_its_segment() -> None:
    value = torch.randn(4, WIDTH, device="cuda:1")
    source = RecordedSource(layout_of(value), 0, address_of(value), None, True, True, False, True)
    for there in (value, value.cpu(), value.to("cuda:0")):
        rebuilt = as_it_was(there, source, Recording(sources=[source], accelerators={value.device: None}))
        assert rebuilt is not None
        assert torch.equal(rebuilt, value)  # raises an error for another device
    assert as_it_was(value + 1, source, Recording(accelerators={value.device: None})) is None


@needs_two
def test_the_gpu_of_a_segment_is_compared_and_not_the_current_one(
    gpu_worker: WorkerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other_model(device: torch.device) -> Mapping[str, str]:
        facts = fingerprint_with_host(device)
        return {**facts, "gpu": "another model"} if device.index == 1 else facts

    monkeypatch.setattr(dispatcher, "fingerprint_with_host", other_model)
    x = torch.ones(WIDTH)
    with backhaul.connect(gpu_worker.address, settings=QUIET) as session:
        for device, fallbacks in (("cuda:0", 0), ("cuda:1", 1)):
            session.checkpoint(torch.sin, x.to(device).requires_grad_()).sum().backward()
            assert session.report().fallbacks == fallbacks
        assert "computes other bits than this trainer: gpu is another model here" in str(session.report())
