"""Trainers on accelerators: the same gradients, and a forward that never waits for the device.

Where there is none, the host's tensors are taken for one's, with digests that can be read, but not in forward.
"""

import copy
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import xxhash
from torch import Tensor, nn

import backhaul
from backhaul import Session
from backhaul._config import LOCALS, Local
from backhaul_runtime.record.contents import FixedDigests
from backhaul_runtime.tensors import deferred_digest
from backhaul_runtime.tensors.deferred_digest import DeferredDigest
from backhaul_runtime.tensors.layout import Layout, host_bytes
from conftest import QUIET_S
from support.bits import Checkpoint, differing, plainly, train
from support.processes import WorkerProcess

BLOCKS, WIDTH = 3, 16
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


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


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Takes digests as on an accelerator. Of each that is read, whether the trainer's thread does so in forward.

    Those that are read when a block ends do not count.
    """
    readings: list[bool] = []
    trainer, read, changed = threading.current_thread(), DeferredDigest.read, FixedDigests.changed

    def reading(self: DeferredDigest) -> bytes:
        readings.append(threading.current_thread() is trainer and torch._C._current_graph_task_id() < 0)
        return read(self)

    def changed_at_the_end(self: FixedDigests) -> Tensor | None:
        before, result = len(readings), changed(self)
        assert len(readings) > before
        del readings[before:]
        return result

    def sums(data: Tensor) -> Tensor:
        return torch.frombuffer(bytearray(xxhash.xxh3_128_digest(host_bytes(data))), dtype=torch.int64)

    monkeypatch.setattr(Layout, "is_on_accelerator", True)
    monkeypatch.setattr(deferred_digest, "device_sums", sums)  # the worker takes the host's
    monkeypatch.setattr(DeferredDigest, "read", reading)
    monkeypatch.setattr(FixedDigests, "changed", changed_at_the_end)
    yield readings


@pytest.mark.slow
def test_forward_reads_no_digest_and_gradients_are_equal(
    session: Session, checkpoint: Checkpoint, reads: list[bool]
) -> None:
    ours = train(checkpoint, build, twice, steps=3, optimizer=fused)
    assert differing(ours, train(plainly, build, twice, steps=3, optimizer=fused)) == []
    assert session.report().fallbacks == 0
    assert len(reads) > 0
    assert sum(reads) == 0


@pytest.mark.slow
def test_a_lost_worker_costs_no_gradient_where_digests_are_unread(
    own_worker: WorkerProcess, reads: list[bool], returns: str
) -> None:
    def run(checkpoint: Checkpoint, model: nn.Module) -> tuple[Tensor, list[Tensor]]:
        loss, inputs = twice(checkpoint, model)
        own_worker.kill()
        return loss, inputs

    with backhaul.connect(own_worker.address, silence_s=QUIET_S) as session:
        ours = train(lambda *args: session.checkpoint(*args, returns=returns), build, run, steps=1)
    assert differing(ours, train(plainly, build, run, steps=1)) == []


def blocks(
    checkpoint: Checkpoint, model: nn.Module, session: Session | None, micro_batches: int = 5
) -> list[Tensor | None]:
    """Returns the gradients of two steps with accumulation blocks, the second of which begins with gradients."""
    torch.manual_seed(0)
    gradients: list[Tensor | None] = []
    for _ in range(2):
        with session.accumulate() if session is not None else nullcontext() as block:
            for _ in range(micro_batches):
                loss, _ = twice(checkpoint, model)
                loss.backward() if block is None else block.backward(loss)
        gradients += [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    return gradients


@pytest.mark.slow
def test_blocks_where_digests_are_unread(session: Session, reads: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session._shares["recompute"], "trainers_share", lambda: 1)
    torch.manual_seed(1)
    model = build()
    twin = copy.deepcopy(model)
    assert differing(blocks(session.checkpoint, model, session), blocks(plainly, twin, None)) == []
    assert session.report().fallbacks == 0
    assert sum(reads) == 0


# With a device


@pytest.fixture(scope="module")
def gpu_worker() -> Iterator[WorkerProcess]:
    with WorkerProcess("--memory", "1GiB", "--device", "cuda") as process:
        yield process


@pytest.fixture
def on_gpu(gpu_worker: WorkerProcess, returns: str) -> Iterator[Checkpoint]:
    """Recomputes on the worker and nowhere else."""
    with backhaul.connect(gpu_worker.address, silence_s=QUIET_S) as session:
        yield lambda *args: session.checkpoint(*args, returns=returns, strict=True)


def build_on_gpu() -> nn.Module:
    return build().cuda()


@needs_gpu
@pytest.mark.parametrize("optimizer", [fused, lambda parameters: torch.optim.SGD(parameters, lr=0.1)])
def test_gradients_on_a_gpu_are_equal(on_gpu: Checkpoint, optimizer: Callable[[Any], torch.optim.Optimizer]) -> None:
    ours = train(on_gpu, build_on_gpu, twice, steps=3, optimizer=optimizer)
    assert differing(ours, train(plainly, build_on_gpu, twice, steps=3, optimizer=optimizer)) == []


@needs_gpu
@pytest.mark.parametrize(("share", "last"), [(0, 0), (1, 0), (0, 2), (1, 1)])
@pytest.mark.parametrize("local", LOCALS)
def test_blocks_on_a_gpu(
    gpu_worker: WorkerProcess, monkeypatch: pytest.MonkeyPatch, share: int, last: int, local: Local
) -> None:
    torch.manual_seed(1)
    model = build_on_gpu()
    twin = copy.deepcopy(model)
    with backhaul.connect(gpu_worker.address, silence_s=QUIET_S) as session:
        monkeypatch.setattr(session._shares[local], "trainers_share", lambda: share)
        monkeypatch.setattr(session._shares[local], "last_segments", lambda *_: last)
        monkeypatch.setattr(session, "accumulate", partial(session.accumulate, local))
        ours = blocks(session.checkpoint, model, session)
        assert session.report().fallbacks == 0
    assert differing(ours, blocks(plainly, twin, None)) == []


@needs_gpu
def test_gradients_are_equal_where_the_trainer_computes_on_a_stream_of_its_own(on_gpu: Checkpoint) -> None:
    def case(checkpoint: Checkpoint) -> list[Tensor | None]:
        with torch.cuda.stream(torch.cuda.Stream()):
            ours = train(checkpoint, build_on_gpu, twice, optimizer=fused)
        torch.cuda.synchronize()
        return ours

    assert differing(case(on_gpu), case(plainly)) == []


@needs_gpu
def test_what_the_gpu_has_yet_to_compute_is_sent_once_it_has(on_gpu: Checkpoint) -> None:
    def late(checkpoint: Checkpoint, model: nn.Module) -> tuple[Tensor, list[Tensor]]:
        x = torch.zeros(8, WIDTH, device="cuda")
        torch.cuda._sleep(200_000_000)  # about 0.1 s
        x += torch.randn(8, WIDTH, device="cuda")
        x.requires_grad_()
        return forward(checkpoint, model, x, torch.ones(WIDTH, device="cuda")), [x]

    assert differing(train(on_gpu, build_on_gpu, late), train(plainly, build_on_gpu, late)) == []


@needs_gpu
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
        loss.backward()
    assert waits == []
