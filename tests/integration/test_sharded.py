"""FSDP2, torch.distributed.fsdp.fully_shard: gradients are those without checkpointing, and workers recompute."""

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import gelu

import backhaul
from backhaul import Decision, Session, unwrap
from backhaul._backend import backend
from backhaul._worker_client.upload.segment_sender import SegmentSender
from backhaul._worker_client.upload.segment_upload import SegmentUpload
from conftest import QUIET, RETURNS, quiet, settle
from support.bits import differing, grad_of
from support.processes import WorkerProcess

WIDTH, BLOCKS, STEPS = 16, 3, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return x + scale * self.down(gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, checkpoint: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.checkpoint = checkpoint

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if self.checkpoint is None else self.checkpoint(block, x)
        return x


def shard(model: Net) -> Net:
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model


def wrapped(session: Session, checkpoint: Callable[..., Any]) -> Net:
    model = Net()
    session.wrap(model, Block, **getattr(checkpoint, "keywords", {}))
    return shard(model)


def wrapped_last(session: Session, checkpoint: Callable[..., Any]) -> Net:
    model = shard(Net())
    session.wrap(model, Block, **getattr(checkpoint, "keywords", {}))
    return model


def wrapped_by_torch(_: Session, checkpoint: Callable[..., Any]) -> Net:
    model = Net()
    model.blocks = nn.ModuleList(checkpoint_wrapper(block, checkpoint_fn=checkpoint) for block in model.blocks)
    return shard(model)


def called(_: Session, checkpoint: Callable[..., Any]) -> Net:
    return shard(Net(checkpoint))


def called_in_a_partial(_: Session, checkpoint: Callable[..., Any]) -> Net:
    return shard(Net(lambda block, x: checkpoint(partial(block, scale=1.0), x)))


def called_by_its_method(_: Session, checkpoint: Callable[..., Any]) -> Net:
    return shard(Net(lambda block, x: checkpoint(partial(block.__call__, scale=1.0), x)))


WAYS = [wrapped, wrapped_last, wrapped_by_torch, called, called_in_a_partial, called_by_its_method]


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield
    dist.destroy_process_group()


def local_gradient(parameter: nn.Parameter) -> Tensor:
    gradient = parameter.grad
    assert isinstance(gradient, DTensor)
    return gradient.to_local().clone()


def trained(
    build: Callable[[], Net], steps: int = STEPS, after_forward: Callable[[], None] = lambda: None
) -> list[Tensor]:
    """Losses and gradients of steps whose optimizer moves the weights; two backwards in each."""
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    results = []
    for _ in range(steps):
        for _ in range(2):
            loss = model(torch.randn(4, WIDTH)).square().mean()
            after_forward()
            loss.backward()
        results += [loss.detach(), *[local_gradient(parameter) for parameter in model.parameters()]]
        optimizer.step()
        optimizer.zero_grad()
    return results


@pytest.mark.slow
@pytest.mark.parametrize("returns", RETURNS)
@pytest.mark.parametrize("build", WAYS)
def test_sharded_blocks_are_recomputed_by_a_worker(
    alone: None, session: Session, build: Callable[..., Net], returns: str
) -> None:
    checkpoint = partial(session.checkpoint, returns=returns, strict=True)
    assert differing(trained(lambda: build(session, checkpoint)), trained(lambda: shard(Net()))) == []
    (segment,) = session.report().segments
    assert segment.decisions == {Decision(returns): 2 * STEPS * BLOCKS}


def compiled(_: Session, checkpoint: Callable[..., Any]) -> Net:
    """As torchtitan does it."""
    model = Net()
    for block in model.blocks:
        block.compile(backend=backend)
    return shard(model)


def called_compiled(_: Session, checkpoint: Callable[..., Any]) -> Net:
    model = Net(checkpoint)
    for block in model.blocks:
        block.forward = torch.compile(block.forward, backend=backend)
    return shard(model)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch.compile says what it ignores
@pytest.mark.usefixtures("fresh_compiler", "alone")
@pytest.mark.parametrize("build", [compiled, called_compiled])
def test_compiled_blocks_inside_of_sharded_ones_are_known(session: Session, build: Callable[..., Net]) -> None:
    assert differing(trained(lambda: build(session, session.checkpoint)), trained(lambda: shard(Net()))) == []
    (segment,) = session.report().segments
    assert segment.decisions == {Decision.GRADIENTS: 2 * STEPS * BLOCKS}
    assert segment.known == segment.calls - 2  # the first block's input takes no gradient, those of others do


@pytest.mark.filterwarnings("ignore")  # torch.compile says what it ignores
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("build", [wrapped, called, compiled])
def test_weights_that_are_freed_before_they_are_sent(
    alone: None, worker: WorkerProcess, build: Callable[..., Net], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is sent before the whole forward has ended."""
    may_send, send = threading.Event(), SegmentSender.send

    def late(self: SegmentSender, save: SegmentUpload) -> None:
        assert may_send.wait(240)
        send(self, save)

    monkeypatch.setattr(SegmentSender, "send", late)
    with backhaul.connect(worker.address, strict=True, settings=quiet(inflight_boundaries=BLOCKS)) as session:
        ours = trained(lambda: build(session, session.checkpoint), 1, may_send.set)
        assert session.report().remote == 2 * BLOCKS
    assert differing(ours, trained(lambda: shard(Net()), 1)) == []


def test_copies_of_weights_go_once_they_are_sent(alone: None, session: Session) -> None:
    model = called(session, session.checkpoint)
    model(torch.randn(4, WIDTH)).sum().backward()  # the first forward makes what stays
    settle(session)
    held = len(session.copies._tensors)
    out = model(torch.randn(4, WIDTH))
    settle(session)
    assert len(session.copies._tensors) - held <= BLOCKS  # boundaries, and no weight
    out.sum().backward()


class Around(nn.Module):
    """Contains a sharded module."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.block, self.after = nn.Linear(WIDTH, WIDTH), Block(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.block(self.before(x).sin()).tanh())


def test_a_segment_that_contains_a_sharded_module_keeps_its_activations(alone: None, session: Session) -> None:
    def build(checkpoint: Callable[..., Any] | None) -> Net:
        model = Net(checkpoint)
        model.blocks = nn.ModuleList(Around() for _ in range(BLOCKS))
        for around in model.blocks:
            assert isinstance(around, Around)
            fully_shard(around.block)
        fully_shard(model)
        return model

    assert differing(trained(lambda: build(session.checkpoint)), trained(lambda: build(None))) == []
    (segment,) = session.report().segments
    assert segment.decisions[Decision.KEPT] == 2 * STEPS * BLOCKS


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch.compile says what it ignores
@pytest.mark.usefixtures("fresh_compiler", "alone")
def test_a_compiled_part_around_a_sharded_module_reads_what_is_gathered(session: Session) -> None:
    def build(*, is_compiled: bool) -> Net:
        model = Net()
        model.blocks = nn.ModuleList(Around() for _ in range(BLOCKS))
        for around in model.blocks:
            assert isinstance(around, Around)
            fully_shard(around.block)
            if is_compiled:
                around.compile(backend=backend)
        fully_shard(model)
        return model

    assert differing(trained(lambda: build(is_compiled=True)), trained(lambda: build(is_compiled=False))) == []
    assert sum(segment.known for segment in session.report().segments) > 0


@pytest.mark.filterwarnings("ignore")  # torch.compile says what it ignores
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("build", [called, compiled])
def test_without_its_worker_a_sharded_segment_is_recomputed_here(
    alone: None, own_worker: WorkerProcess, build: Callable[..., Net]
) -> None:
    with backhaul.connect(own_worker.address, settings=QUIET) as session:
        ours = trained(lambda: build(session, session.checkpoint), 1, own_worker.kill)
        assert session.report().fallbacks == 2 * BLOCKS
    assert differing(ours, trained(lambda: shard(Net()), 1)) == []


def test_a_weight_that_the_worker_gave_up_is_not_read_here(
    alone: None, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = called(session, session.checkpoint), torch.randn(4, WIDTH)
    model(x).sum().backward()
    settle(session)
    (worker,) = session._workers
    monkeypatch.setattr(worker.uploader.stored, "unknown", lambda _, addresses: set(addresses))
    model(x).sum().backward()
    assert session.report().fallbacks == BLOCKS
    (reason,) = session.report().segments[0].reasons
    assert reason.startswith("the worker evicted a parameter that FSDP has freed on the trainer as well")


def test_wrapping_changes_neither_names_nor_what_is_sharded(alone: None, session: Session) -> None:
    plain, ours = shard(Net()), wrapped(session, session.checkpoint)
    assert list(ours.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert all(isinstance(block, FSDPModule) for block in ours.blocks)
    assert not isinstance(ours.blocks[0]._checkpoint_wrapped_module, FSDPModule)
    with pytest.raises(ValueError, match=r"blocks\.0 was sharded after wrap\(\)"):
        unwrap(ours)


def test_forward_is_the_modules_own_again(alone: None, session: Session) -> None:
    block = shard(Net()).blocks[0]
    with pytest.raises(RuntimeError, match="normalized_shape"):
        session.checkpoint(block, torch.randn(3, 5))
    assert "forward" not in vars(block)
    block.forward = own = lambda x: x * 2
    x = torch.ones(2, requires_grad=True)
    session.checkpoint(block, x).sum().backward()
    assert grad_of(x).tolist() == [2, 2]
    assert block.forward is own
