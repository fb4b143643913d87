"""Trainers whose digests stay on a device: the host's tensors are taken for a device's, and forward reads no digest.

Tests on a real or simulated device are in tests/accelerators.
"""

import copy
import threading
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
import xxhash
from torch import Tensor, nn

import backhaul
from backhaul import Session
from backhaul_runtime.record.contents import FixedDigests
from backhaul_runtime.tensors import deferred_digest
from backhaul_runtime.tensors.deferred_digest import DeferredDigest
from backhaul_runtime.tensors.layout import Layout, host_bytes
from conftest import QUIET
from support.bits import Checkpoint, differing, plainly, train
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

    with backhaul.connect(own_worker.address, settings=QUIET) as session:
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
