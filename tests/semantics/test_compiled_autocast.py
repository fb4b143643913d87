"""Compiled segments under autocast are recorded once, whatever other code casts in the same region."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  torch's own name for it

import backhaul
from backhaul import Session
from backhaul._backend import backend
from backhaul._forward import known_uses
from backhaul._forward.known_uses import OTHER_CASTS
from backhaul_runtime.torch_internals.autocast_cache import STALE_CAST, cached_casts
from conftest import QUIET
from semantics.test_autocast import CASES, Case, a_cast_made_inside_for_others, a_loop_of_tied_layers, autocast
from support.bits import Checkpoint, differing, plainly
from support.calls import WIDTH, same, seed
from support.compiled import MARKS, own
from support.devices import DEVICE
from support.loopback import Loopback
from support.processes import WorkerProcess

pytestmark = MARKS

CALLS = 5
"""With graphs="eager" the first three calls of a kind are recorded."""


def user(remote: Loopback) -> Checkpoint:
    return lambda function, *args: remote.checkpoint(torch.compile(function, backend=backend), *args)


def a_tied_weight_outside_of_some_calls(checkpoint: Checkpoint, linear: nn.Linear, x: Tensor) -> Tensor:
    """Whether a call casts the weight differs from call to call."""
    h = x * 1
    for is_before in (False, True, False):
        with autocast():
            h = linear(h) if is_before else h * 1
            h = checkpoint(lambda h: linear(F.dropout(h, 0.3)).sin() * linear.bias.sum(), h)
    return h


def two_micro_batches_in_one_region(checkpoint: Checkpoint, linear: nn.Linear, x: Tensor) -> Tensor:
    with autocast():
        first, second = (checkpoint(lambda h: F.gelu(linear(h)) * linear.weight.sum(), part) for part in (x, x.sin()))
        return linear(first) + linear.weight.sum() * second


def a_detached_branch(checkpoint: Checkpoint, linear: nn.Linear, x: Tensor) -> Tensor:
    """Its cast is made before or after others, and leads to no output."""
    other = nn.Linear(WIDTH, WIDTH)

    def fn(h: Tensor) -> Tensor:
        return linear(h) * other(h).detach() * linear.weight.sum()

    with autocast():
        h = checkpoint(fn, x * 1)
        h = checkpoint(fn, h)
    with autocast():
        return checkpoint(fn, other(h))


def float_inside(checkpoint: Checkpoint, linear: nn.Linear, x: Tensor) -> Tensor:
    def fn(h: Tensor) -> Tensor:
        with torch.autocast(DEVICE, enabled=False):
            exact = linear(h.float())
        return linear(h) + exact

    with autocast():
        return checkpoint(fn, checkpoint(fn, x * 1))


def halves(checkpoint: Checkpoint, linear: nn.Linear, x: Tensor) -> Tensor:
    with autocast(dtype=torch.float16):
        return linear(checkpoint(lambda h: linear(h).sin(), x * 1))


def without_gradients_inside(checkpoint: Checkpoint, linear: nn.Linear, x: Tensor) -> Tensor:
    def fn(h: Tensor) -> Tensor:
        with torch.no_grad():
            scale = linear(h).abs().sum()
        return linear(h) / scale

    with autocast():
        return checkpoint(fn, linear(checkpoint(fn, x * 1)))


OWN_CASES = [
    a_tied_weight_outside_of_some_calls,
    two_micro_batches_in_one_region,
    a_detached_branch,
    float_inside,
    halves,
    without_gradients_inside,
]
NOT_KNOWN = {  # and why, with graphs="eager"
    "an_op_that_fails_between_regions": "torch.compile cannot capture it whole",
    "an_op_that_fails_first_in_a_region": "torch.compile cannot capture it whole",
    "an_op_that_fails_without_gradients": "torch.compile cannot capture it whole",
    "cleared_inside": "torch.compile cannot capture it whole",
    "nested": "torch.compile cannot capture it whole",
    "in_a_region_of_another_dtype": "the graph of its inside stays on the trainer",
    "after_a_region_of_another_dtype": "the graph of its inside stays on the trainer",
    "a_region_of_another_dtype_after_uses_that_cast_nothing": "the graph of its inside stays on the trainer",
}


@pytest.mark.slow
@pytest.mark.parametrize("case", [*CASES, *OWN_CASES])
def test_a_weight_used_more_than_once_by_known_programs(case: Case) -> None:
    remote = Loopback()

    def run(checkpoint: Checkpoint) -> list[Tensor | None]:
        results = list[Tensor | None]()
        for _ in range(CALLS):
            linear, x = nn.Linear(WIDTH, WIDTH), torch.randn(4, WIDTH, requires_grad=True)
            case(checkpoint, linear, x).float().square().sum().backward()
            results += [x.grad, linear.weight.grad, linear.bias.grad]
        return results

    same(run, own(remote))
    segment = remote.report().segments[0]
    if case.__name__ in NOT_KNOWN:
        assert all(NOT_KNOWN[case.__name__] in reason for reason in segment.recorded)
    else:
        assert segment.known
        assert not segment.recorded
        assert not segment.reasons


@pytest.mark.parametrize("case", [a_loop_of_tied_layers, a_cast_made_inside_for_others, *OWN_CASES])
def test_blocks_that_the_user_has_compiled(case: Case) -> None:
    remote = Loopback()

    def run(checkpoint: Checkpoint) -> list[Tensor | None]:
        results = list[Tensor | None]()
        for _ in range(3):
            linear, x = nn.Linear(WIDTH, WIDTH), torch.randn(4, WIDTH, requires_grad=True)
            case(checkpoint, linear, x).float().square().sum().backward()
            results += [x.grad, linear.weight.grad, linear.bias.grad]
        return results

    same(run, user(remote))
    assert remote.report().segments[0].known


def test_calls_that_share_casts_with_others_are_of_one_kind() -> None:
    """One call casts the weights, the next takes some or all of them from autocast's cache."""
    remote, block = Loopback(), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)).to(DEVICE)
    for number in range(12):

        def run(checkpoint: Checkpoint, number: int = number) -> list[Tensor | None]:
            block.zero_grad()
            x = torch.randn(4, WIDTH, requires_grad=True)
            with autocast():
                h = x * 1
                for bit in range(2):
                    h = block[2 * bit](h) if number & (1 << bit) else h
                checkpoint(block, h).float().square().sum().backward()
            return [x.grad, *(parameter.grad for parameter in block.parameters())]

        same(run, own(remote))
    (segment,) = remote.report().segments
    assert segment.known == 9 - 3  # the input is of another dtype after a layer, which makes a kind of its own
    assert not segment.recorded


def test_compiling_keeps_the_casts_of_the_region() -> None:
    linear, x = nn.Linear(WIDTH, WIDTH).to(DEVICE), torch.randn(4, WIDTH, device=DEVICE, requires_grad=True)
    with autocast():
        linear(x)
        (before,) = cached_casts([linear.weight])
        own(Loopback())(lambda h: linear(h).sin(), x)
        torch.compile(lambda h: linear(h).cos(), backend=backend)(x)
        (after,) = cached_casts([linear.weight])
    assert before is not None
    assert before is after


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"cache_enabled": False}, {"dtype": torch.float16}])
def test_training_with_a_scaler_and_micro_batches(options: dict[str, Any]) -> None:
    remote = Loopback()

    def train(checkpoint: Checkpoint) -> list[Tensor | None]:
        blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        optimizer, scaler = torch.optim.SGD(blocks.parameters(), lr=0.1), torch.amp.GradScaler(DEVICE, init_scale=64.0)
        results = list[Tensor | None]()
        for _ in range(4):
            for _ in range(2):
                h = torch.randn(4, WIDTH)
                with autocast(**options):
                    for block in blocks:
                        h = h + F.dropout(checkpoint(block, h), 0.1)
                    loss = h.float().square().mean()
                scaler.scale(loss).backward()
                results.append(loss.detach())
            scaler.unscale_(optimizer)
            results += [parameter.grad.clone() for parameter in blocks.parameters() if parameter.grad is not None]
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return results

    same(train, own(remote))
    (segment,) = remote.report().segments
    assert segment.calls == 24
    assert segment.known >= 18
    assert not segment.recorded


def test_a_weight_that_changes_within_a_region_keeps_its_activations(session: Session) -> None:
    def train(checkpoint: Checkpoint) -> list[Tensor | None]:
        linear, results = nn.Linear(WIDTH, WIDTH), list[Tensor | None]()
        optimizer = torch.optim.SGD(linear.parameters(), lr=1.0)
        for steps in (1, 1, 1, 1, 3):  # the last region goes on with the casts of its first step
            with autocast():
                for _ in range(steps):
                    loss = checkpoint(lambda h: F.gelu(linear(h)), torch.ones(2, WIDTH)).float().square().mean()
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    results.append(loss.detach())
        return [*results, linear.weight.detach()]

    same(train, functools.partial(session.checkpoint, graphs="eager"))
    (segment,) = session.report().segments
    assert segment.kept == {STALE_CAST: 2}
    assert segment.known == 2


@pytest.mark.slow
def test_blocks_that_train_on_two_workers(worker: WorkerProcess, own_worker: WorkerProcess) -> None:
    """In blocks of accumulation, too, where workers add up gradients."""

    def train(checkpoint: Checkpoint, accumulate: Callable[[], AbstractContextManager[Any]]) -> list[Tensor | None]:
        seed()
        linear = nn.Linear(WIDTH, WIDTH)
        block, results = nn.Sequential(nn.LayerNorm(WIDTH), linear, nn.GELU(), nn.Dropout(0.2), linear), []
        for _ in range(4):
            block.zero_grad()
            with accumulate():
                for _ in range(3):
                    with autocast():
                        h = linear(torch.randn(4, WIDTH))
                        loss = linear(checkpoint(block, checkpoint(block, h))).float().square().mean()
                    loss.backward()
            results += [parameter.grad for parameter in block.parameters()]
        return [None if one is None else one.clone() for one in results]

    expected = train(plainly, nullcontext)
    with backhaul.connect(f"{worker.address},{own_worker.address}", graphs="eager", settings=QUIET) as session:
        assert not differing(train(session.checkpoint, nullcontext), expected)
        assert not differing(train(session.checkpoint, session.accumulate), expected)
        report = session.report()
    assert sum(segment.known for segment in report.segments) >= 40
    assert report.fallbacks == 0


def test_a_region_inside_a_region_with_other_settings_is_recorded() -> None:
    remote, linear = Loopback(), nn.Linear(WIDTH, WIDTH).to(DEVICE)

    def fn(h: Tensor) -> Tensor:
        with autocast():
            return linear(h).float().sin()

    def run(checkpoint: Checkpoint) -> list[Tensor | None]:
        linear.zero_grad()
        x = torch.randn(4, WIDTH, requires_grad=True)
        with autocast():
            with torch.autocast(DEVICE, enabled=False):
                h = checkpoint(fn, x)
            h = linear(h)
            with torch.autocast(DEVICE, enabled=False):
                h = checkpoint(fn, h.float())
        checkpoint(fn, h.float()).square().sum().backward()
        return [x.grad, *(parameter.grad for parameter in linear.parameters())]

    for _ in range(4):
        same(run, own(remote))
    (segment,) = remote.report().segments
    assert list(segment.recorded) == ["it turns autocast on inside a region with other settings"]


@pytest.mark.parametrize("lost", ["all", "one", "changed"])
def test_casts_that_another_thread_drops_leave_the_gradients_as_they_are(
    lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = Loopback()
    block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).to(DEVICE)

    def run(checkpoint: Checkpoint) -> list[Tensor | None]:
        block.zero_grad()
        x = torch.randn(4, WIDTH, requires_grad=True)
        with autocast():
            checkpoint(block, x * 1).float().square().sum().backward()
        return [x.grad, *(parameter.grad for parameter in block.parameters())]

    for _ in range(4):
        same(run, own(remote))

    def read(weights: list[Tensor]) -> list[Tensor | None]:
        casts = cached_casts(weights)
        if lost == "changed":
            return [None if cast is None else cast.detach() for cast in casts]
        return [None if lost == "all" or number == 1 else cast for number, cast in enumerate(casts)]

    monkeypatch.setattr(known_uses, "cached_casts", read)
    same(run, own(remote))
    (segment,) = remote.report().segments
    assert segment.reasons == {OTHER_CASTS: 1}
