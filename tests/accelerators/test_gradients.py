"""Trainers on an accelerator: the same gradients, and a forward that never waits for the device."""

import copy
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import backhaul
from backhaul._backward.local_recompute import outputs_here
from backhaul._config import LOCALS, Local
from backhaul._worker_client.upload.segment_sender import SegmentSender
from conftest import QUIET
from support.bits import Checkpoint, differing, plainly, train
from support.blocks import loop
from support.calls import sines
from support.processes import WorkerProcess

BLOCKS, WIDTH = 3, 16


class Block(nn.Module):
    """With a weight, an input, a mask that all blocks share, and statistics that forward writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + nn.functional.dropout(self.norm(self.linear(x)).relu(), 0.3) * mask


def build() -> nn.Module:
    return nn.ModuleList(Block() for _ in range(BLOCKS))


def twice(checkpoint: Checkpoint, model: nn.Module) -> tuple[Tensor, list[Tensor]]:
    """Two forwards before one backward, through the same statistics."""
    x = torch.randn(8, WIDTH, device=next(model.parameters()).device, requires_grad=True)
    mask = (torch.arange(WIDTH, device=x.device) % 3 > 0).float()
    return forward(checkpoint, model, x, mask) + forward(checkpoint, model, x, mask), [x]


def forward(checkpoint: Checkpoint, model: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
    for block in model.children():
        x = checkpoint(block, x, mask)
    return x.square().mean()


def fused(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Leaves version counters as they are."""
    return torch.optim.AdamW(parameters, lr=0.01, fused=True)


def blocks(checkpoint: Checkpoint, model: nn.Module, accumulate: Callable[[], Any]) -> list[Tensor | None]:
    """Returns the gradients of two steps with accumulation blocks, the second of which begins with gradients."""
    torch.manual_seed(0)
    gradients: list[Tensor | None] = []
    for _ in range(2):
        with accumulate() as block:
            for _ in range(5):
                loss, _ = twice(checkpoint, model)
                block.backward(loss)
        gradients += [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    return gradients


@pytest.fixture(scope="module")
def gpu_worker() -> Iterator[WorkerProcess]:
    with WorkerProcess("--memory", "1GiB", "--device", "cuda") as process:
        yield process


@pytest.fixture
def on_gpu(gpu_worker: WorkerProcess, returns: str) -> Iterator[Checkpoint]:
    """Recomputes on the worker and nowhere else."""
    with backhaul.connect(gpu_worker.address, settings=QUIET) as session:
        yield lambda *args: session.checkpoint(*args, returns=returns, strict=True)


def build_on_gpu() -> nn.Module:
    return build().cuda()


@pytest.mark.parametrize("optimizer", [fused, lambda parameters: torch.optim.SGD(parameters, lr=0.1)])
def test_gradients_on_a_gpu_are_equal(on_gpu: Checkpoint, optimizer: Callable[[Any], torch.optim.Optimizer]) -> None:
    ours = train(on_gpu, build_on_gpu, twice, steps=3, optimizer=optimizer)
    assert differing(ours, train(plainly, build_on_gpu, twice, steps=3, optimizer=optimizer)) == []


@pytest.mark.parametrize(("share", "last"), [(0, 0), (1, 0), (0, 2), (1, 1)])
@pytest.mark.parametrize("local", LOCALS)
def test_blocks_on_a_gpu(
    gpu_worker: WorkerProcess, monkeypatch: pytest.MonkeyPatch, share: int, last: int, local: Local
) -> None:
    torch.manual_seed(1)
    model = build_on_gpu()
    twin = copy.deepcopy(model)
    with backhaul.connect(gpu_worker.address, settings=QUIET) as session:
        monkeypatch.setattr(session._shares[local], "trainers_share", lambda: share)
        monkeypatch.setattr(session._shares[local], "last_segments", lambda *_: last)
        ours = blocks(session.checkpoint, model, partial(session.accumulate, local))
        assert session.report().fallbacks == 0
    assert differing(ours, blocks(plainly, twin, loop)) == []


def test_gradients_are_equal_where_the_trainer_computes_on_a_stream_of_its_own(on_gpu: Checkpoint) -> None:
    def case(checkpoint: Checkpoint) -> list[Tensor | None]:
        with torch.cuda.stream(torch.cuda.Stream()):
            ours = train(checkpoint, build_on_gpu, twice, optimizer=fused)
        torch.cuda.synchronize()
        return ours

    assert differing(case(on_gpu), case(plainly)) == []


def test_what_the_gpu_has_yet_to_compute_is_sent_once_it_has(on_gpu: Checkpoint) -> None:
    def late(checkpoint: Checkpoint, model: nn.Module) -> tuple[Tensor, list[Tensor]]:
        x = torch.zeros(8, WIDTH, device="cuda")
        torch.cuda._sleep(200_000_000)  # about 0.1 s
        x += torch.randn(8, WIDTH, device="cuda")
        x.requires_grad_()
        return forward(checkpoint, model, x, torch.ones(WIDTH, device="cuda")), [x]

    assert differing(train(on_gpu, build_on_gpu, late), train(plainly, build_on_gpu, late)) == []


def test_forward_never_waits_for_the_gpu(on_gpu: Checkpoint) -> None:
    trainer, waits = threading.current_thread(), list[str]()

    def note(message: Any, *_: Any, **__: Any) -> None:
        if threading.current_thread() is trainer:
            waits.append(str(message))

    model = build_on_gpu()
    for _ in range(2):  # the first allocates, and finds out what calls will be
        x, mask = torch.randn(8, WIDTH, device="cuda", requires_grad=True), torch.ones(WIDTH, device="cuda")
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = note
            waits.clear()
            torch.cuda.set_sync_debug_mode("warn")
            try:
                loss = forward(on_gpu, model, x, mask)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            loss.backward()  # here, as the sender may still be in a copy whose warning would be an error outside
    assert waits == []


def test_a_backward_inside_of_a_segment(gpu_worker: WorkerProcess, returns: str) -> None:
    """Autograd would run it in a thread of the device, where the recorder is not."""

    def slope(checkpoint: Checkpoint, model: nn.Module) -> tuple[Tensor, list[Tensor]]:
        def with_slope(x: Tensor) -> Tensor:
            y = model(x).tanh()
            (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
            return (y * gradient).sin()

        x = torch.randn(8, WIDTH, device="cuda", requires_grad=True)
        return checkpoint(with_slope, x * 1).sum(), [x]

    def layer() -> nn.Module:
        return nn.Linear(WIDTH, WIDTH).cuda()

    with backhaul.connect(gpu_worker.address, settings=QUIET) as session:
        assert (
            differing(train(partial(session.checkpoint, returns=returns), layer, slope), train(plainly, layer, slope))
            == []
        )


@pytest.mark.parametrize("durability", ["none", "lineage"])
def test_a_copy_that_waits_to_be_sent_is_not_computed_again(
    gpu_worker: WorkerProcess, monkeypatch: pytest.MonkeyPatch, durability: str
) -> None:
    """The trainer has dropped it, and does not know the address of its contents, which is still on the GPU."""
    recomputed, may_send, send = list[str](), threading.Event(), SegmentSender.send

    def send_late(sender: SegmentSender, save: Any) -> None:
        may_send.wait()
        send(sender, save)

    def noted(name: str, *args: Any) -> Any:
        recomputed.append(name)
        return outputs_here(name, *args)

    monkeypatch.setattr(SegmentSender, "send", send_late)
    monkeypatch.setattr("backhaul._backward.lineage.outputs_here", noted)
    x = torch.randn(8, WIDTH, device="cuda", requires_grad=True)
    with backhaul.connect(gpu_worker.address, settings=QUIET) as session:
        checkpoint = partial(session.checkpoint, returns="gradients", durability=durability)
        try:
            y = checkpoint(sines, checkpoint(sines, x))
            (ours,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        finally:
            may_send.set()
    assert torch.equal(ours, torch.autograd.grad(sines(sines(x)).sum(), x)[0])
    assert recomputed == []
