"""Accumulation blocks that are used in a wrong way or fail: a named error, and no gradient."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import backhaul
from backhaul import Session
from backhaul._accumulate.block import AccumulationBlock
from conftest import QUIET, wait_until
from support.bits import differing, grad_of, plainly
from support.blocks import WIDTH, Model
from support.processes import WorkerProcess


def test_wrong_use(session: Session, worker: WorkerProcess) -> None:
    model, x = Model("plain"), torch.randn(8, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")

    def error_of(use: Callable[[AccumulationBlock], Any]) -> str:
        with pytest.raises(backhaul.AccumulationError) as caught, session.accumulate() as block:
            block.backward(model.loss(session.checkpoint, x))
            use(block)
        assert all(parameter.grad is None for parameter in model.parameters())
        return str(caught.value)

    def in_another_thread(use: Callable[[], Any]) -> None:
        with ThreadPoolExecutor(1) as thread:
            thread.submit(use).result()

    def open_another() -> None:
        with session.accumulate():
            pass

    def changed(block: AccumulationBlock) -> None:
        with torch.no_grad():
            model.linears[0].weight.add_(1)

    def of_another_session(block: AccumulationBlock) -> None:
        with backhaul.connect(worker.address, settings=QUIET) as other:
            block.backward(model.loss(other.checkpoint, x))

    def hooked(block: AccumulationBlock) -> None:
        handle = model.linears[1].weight.register_hook(lambda gradient: gradient * 2)
        try:
            block.backward(model.loss(session.checkpoint, x))
        finally:
            handle.remove()

    def frozen(block: AccumulationBlock) -> None:
        model.linears[1].weight.requires_grad_(False)
        try:
            block.flush()
        finally:
            model.linears[1].weight.requires_grad_(True)

    uses: dict[str, Callable[[AccumulationBlock], Any]] = {
        "nested": lambda block: open_another(),
        "belongs to another thread": lambda block: in_another_thread(
            lambda: block.backward(model.loss(session.checkpoint, x))
        ),
        "another thread has a block": lambda block: in_another_thread(open_another),
        "was changed inside": changed,
        "its hooks": hooked,
        "or requires_grad": frozen,
        "another session": of_another_session,
        "step() inside": lambda block: optimizer.step(),
        "clipping gradients inside": lambda block: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        "clipping": lambda block: nn.utils.clip_grad_value_(model.parameters(), 1.0),
        "GradScaler.unscale_() inside": lambda block: scaler.unscale_(optimizer),
        "GradScaler.step() inside": lambda block: scaler.step(optimizer),
        "scalar loss": lambda block: block.backward(torch.ones(())),
    }
    for message, use in uses.items():
        assert message in error_of(use)
    with session.accumulate() as block:
        pass
    with pytest.raises(backhaul.AccumulationError, match="has ended"):
        block.backward(model.loss(session.checkpoint, x))


def test_an_unknown_way_to_compute_the_share(session: Session) -> None:
    with pytest.raises(ValueError, match="'recompute', 'keep'"), session.accumulate("drop"):  # type: ignore[arg-type]
        pass


def test_a_loss_can_be_used_only_once(session: Session) -> None:
    model = Model("plain")
    with pytest.raises(RuntimeError, match="second time"), session.accumulate() as block:
        loss = model.loss(session.checkpoint, torch.randn(8, WIDTH))
        block.backward(loss)
        block.backward(loss)
    assert model.head.weight.grad is None


def test_nothing_is_replaced_without_a_block(session: Session) -> None:
    names = [(torch.autograd, "backward"), (torch.amp.GradScaler, "step"), (torch.amp.GradScaler, "unscale_")]
    own = [getattr(owner, name) for owner, name in names]
    with session.accumulate():
        assert all(getattr(owner, name) is not before for (owner, name), before in zip(names, own, strict=True))
    assert [getattr(owner, name) for owner, name in names] == own


def test_an_error_that_is_caught_inside_a_block(session: Session) -> None:
    model = Model("plain")
    with pytest.raises(backhaul.AccumulationError, match="incomplete"), session.accumulate() as block:
        for number in range(7):
            y = model.embedding(torch.randn(8, WIDTH))
            if number == 1:
                y.register_hook(lambda gradient: (_ for _ in ()).throw(KeyError("once")))
            for segment in model.segments:
                y = session.checkpoint(segment, y)
            with suppress(KeyError):
                block.backward(model.head(y).square().mean())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_hook_that_fails_leaves_no_gradient(session: Session) -> None:
    model, calls = Model("plain"), list[int]()

    def fail(gradient: Tensor) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise KeyError

    model.linears[1].weight.register_hook(fail)
    with pytest.raises(KeyError), session.accumulate() as block:
        for _ in range(3):
            block.backward(model.loss(session.checkpoint, torch.randn(8, WIDTH)))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_block_that_fails_leaves_nothing(session: Session, worker: WorkerProcess) -> None:
    torch.manual_seed(0)
    model = Model("plain")
    xs = [torch.randn(8, WIDTH) for _ in range(3)]

    def run(block: AccumulationBlock) -> None:
        torch.manual_seed(1)
        for x in xs:
            block.backward(model.loss(session.checkpoint, x))

    with pytest.raises(KeyError), session.accumulate() as block:
        run(block)
        raise KeyError
    assert all(parameter.grad is None for parameter in model.parameters())
    wait_until(lambda: worker.telemetry().memory.result_bytes == 0, "nothing is kept")
    with session.accumulate() as block:
        run(block)
    ours = [grad_of(parameter).clone() for parameter in model.parameters() if parameter is not model.scale]
    model.zero_grad()
    torch.manual_seed(1)
    for x in xs:
        model.loss(plainly, x).backward()
    assert differing(ours, [grad_of(p) for p in model.parameters() if p is not model.scale]) == []
