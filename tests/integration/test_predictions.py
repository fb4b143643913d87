"""Calls whose inputs are at the worker before they run: gradients are those of training without that."""

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import backhaul
from backhaul import Session
from backhaul._dispatch import prediction
from backhaul._dispatch.prediction import CallSite, CallSites
from backhaul._worker_client.upload.segment_upload import SegmentUpload
from backhaul._worker_client.upload.uploader import Uploader
from conftest import settle, wait_until
from support.bits import Checkpoint, differing, plainly, train
from support.processes import WorkerProcess

BLOCKS, STEPS = 3, 4
Call = tuple[Callable[..., Tensor], tuple[Tensor, ...]]
Run = Callable[[Checkpoint, nn.Module], tuple[Tensor, list[Tensor]]]


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each save, whether it was sent before its call ran."""
    predicted: list[bool] = []
    save = Uploader.save

    def noting(self: Uploader, item: SegmentUpload) -> None:
        predicted.append(item.is_predicted)
        save(self, item)

    monkeypatch.setattr(Uploader, "save", noting)
    return predicted


def build() -> nn.ModuleList:
    return nn.ModuleList(
        nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.GELU(), nn.Dropout(0.5)) for _ in range(BLOCKS)
    )


def through(call: Callable[[nn.Module, int], Callable[..., Any]]) -> Run:
    def run(checkpoint: Checkpoint, model: nn.Module) -> tuple[Tensor, list[Tensor]]:
        x = h = torch.randn(8, 16, requires_grad=True)
        for number, block in enumerate(model.children()):
            h = checkpoint(call(block, number), h)
        return h.square().mean(), [x]

    return run


def reseeding(block: nn.Module, _: int) -> Callable[..., Any]:
    def fn(x: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            x = nn.functional.dropout(x)
        return block(x)

    return fn


def changing() -> Callable[[nn.Module, int], Callable[..., Any]]:
    calls = iter(range(1000))

    def call(block: nn.Module, _: int) -> Callable[..., Any]:
        scale = float(next(calls))
        return lambda x: block(x) * scale

    return call


def replacing(block: nn.Module, _: int) -> Callable[..., Any]:
    """A weight that the call itself changes before it uses it."""

    def fn(x: Tensor) -> Tensor:
        with torch.no_grad():
            block[0].bias.mul_(0.5)  # type: ignore[index]
        return block(x)

    return fn


@pytest.mark.parametrize(
    ("make", "predicted", "wasted"),
    [
        (lambda: lambda block, _: block, BLOCKS * (STEPS - 1), {0}),
        (lambda: lambda block, _: lambda x: block(x) * 2, BLOCKS * (STEPS - 1), {0}),
        # Its draws are not those that follow each other. The worker remembers the program once it has met it.
        (lambda: reseeding, BLOCKS * (STEPS - 1), set(range(BLOCKS + 1))),
        (changing, BLOCKS, {BLOCKS}),  # each place is tried once
        (lambda: replacing, BLOCKS * (STEPS - 1), {0}),  # a replay too starts from the weight as it was before the call
    ],
    ids=["modules", "functions", "reseeding", "changing", "replacing"],
)
def test_gradients_are_those_of_training_without_it(
    session: Session,
    worker: WorkerProcess,
    saved: list[bool],
    make: Callable[[], Callable[..., Any]],
    predicted: int,
    wasted: set[int],
) -> None:
    def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    before = worker.telemetry()
    ours = train(session.checkpoint, build, through(make()), steps=STEPS, optimizer=optimizer)
    assert differing(ours, train(plainly, build, through(make()), steps=STEPS, optimizer=optimizer)) == []
    assert saved.count(True) == predicted
    assert saved.count(False) == BLOCKS * STEPS
    assert session.report().fallbacks == 0
    settle(session)
    after = worker.telemetry()
    assert after.speculation_misses - before.speculation_misses in wasted


def test_calls_of_functions_without_a_backward_leave_nothing_behind(session: Session, saved: list[bool]) -> None:
    linear = nn.Linear(4, 4)

    def call() -> Tensor:
        return session.checkpoint(lambda x: linear(x).tanh(), torch.randn(2, 4))

    def places() -> int:
        settle(session)  # else some wait to be sent
        gc.collect()
        return sum(isinstance(tracked, CallSite) for tracked in gc.get_objects())

    before = places()
    for _ in range(20):
        loss = call()  # while that of the last call is alive
    del loss
    assert places() <= before + 1  # settling calls a function, now at another position
    saved.clear()
    for _ in range(4):
        call().sum().backward()
    assert saved.count(True) >= 2


def test_of_too_many_places_the_least_recently_reached_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backhaul._dispatch.prediction.MAX_SITES", 2)
    sites = CallSites()
    reached = [sites.of(torch.sin, position) for position in range(3)]
    for site in (*reached[:2], reached[0], reached[2]):
        sites.keep(site)
    assert [sites.of(torch.sin, position) is site for position, site in enumerate(reached)] == [True, False, True]


def test_a_call_that_fails_leaves_nothing_behind(session: Session, worker: WorkerProcess) -> None:
    linear = nn.Linear(4, 4)
    fails = False

    class Failing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if fails:
                raise KeyError("no")
            return linear(x).relu()

    module = Failing()
    for fails in (False, True, False):
        x = torch.randn(2, 4, requires_grad=True)
        if fails:
            with pytest.raises(KeyError):
                session.checkpoint(module, x)
        else:
            session.checkpoint(module, x).sum().backward()
    settle(session)
    wait_until(lambda: [held.segments for held in worker.telemetry().sessions] == [0], "all are released")


@pytest.mark.parametrize("number", [0, 3])
def test_ctrl_c_while_a_call_is_learnt_from(session: Session, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """The interrupted call has other sources than those before."""
    layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    def gradient(checkpoint: Checkpoint) -> Tensor | None:
        x = torch.ones(2, 8, requires_grad=True)
        checkpoint(layers, x).sum().backward()
        return x.grad

    for call in range(number + 3):
        if call == number:
            layers.append(nn.Linear(8, 8))
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(prediction, "_Seen", interrupted)
                gradient(session.checkpoint)
        assert differing([gradient(session.checkpoint)], [gradient(plainly)]) == []
    assert session.report().fallbacks == 0


def test_what_is_no_longer_the_same_is_not_sent_before(session: Session, saved: list[bool]) -> None:
    """Another shape, another dtype, a weight that is gone."""
    modules = [nn.Linear(4, 4), nn.Linear(4, 4).double()]

    def step(x: Tensor, module: nn.Module) -> None:
        session.checkpoint(lambda x: module(x).tanh(), x).sum().backward()

    step(torch.randn(2, 4), modules[0])
    step(torch.randn(3, 4), modules[0])
    step(torch.randn(3, 4).double(), modules[1])
    assert saved == [False] * 3
    assert session.report().fallbacks == 0


def with_fewer_arguments(x: Tensor) -> Iterator[Call]:
    def fn(*tensors: Tensor) -> Tensor:
        return torch.stack(tensors).tanh()

    yield fn, (x, x)
    yield fn, (x,)


def without_a_weight(x: Tensor) -> Iterator[Call]:
    holder: Any = nn.Module()
    holder.weight = torch.randn(4, 4)

    def fn(x: Tensor) -> Tensor:
        return (x @ holder.weight if hasattr(holder, "weight") else x).tanh()

    yield fn, (x,)
    del holder.weight
    yield fn, (x,)


def with_a_weight_in_a_list(x: Tensor) -> Iterator[Call]:
    """Which has no place. It looks like the argument."""
    weights = [torch.randn(4, 4, requires_grad=True)]

    def fn(x: Tensor) -> Tensor:
        return (x @ weights[0]).tanh()

    yield fn, (x,)
    yield fn, (x,)


def without_a_leaf(x: Tensor) -> Iterator[Call]:
    def fn(x: Tensor) -> Tensor:
        return x.tanh()

    yield fn, (x,)
    yield fn, (x * 2,)


def without_a_gradient(x: Tensor) -> Iterator[Call]:
    linear = nn.Linear(4, 4)

    def fn(x: Tensor) -> Tensor:
        return linear(x).tanh()

    yield fn, (x,)
    yield fn, (x.detach(),)


@pytest.mark.parametrize(
    "calls",
    [with_fewer_arguments, without_a_weight, with_a_weight_in_a_list, without_a_leaf, without_a_gradient],
    ids=lambda f: f.__name__,
)
def test_what_the_next_call_does_not_have_is_not_sent_before(
    session: Session, saved: list[bool], calls: Callable[[Tensor], Iterator[Call]]
) -> None:
    for fn, arguments in calls(torch.randn(4, 4, requires_grad=True)):
        session.checkpoint(fn, *arguments).sum().backward()
    assert saved == [False] * 2
    assert session.report().fallbacks == 0


@pytest.mark.parametrize("fused", [False, True], ids=["counted", "fused"])
def test_weights_that_an_optimizer_changed(session: Session, worker: WorkerProcess, *, fused: bool) -> None:
    """A fused one leaves version counters as they are. That is found out, at the price of one step's prediction."""

    def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.1, fused=fused)

    before = worker.telemetry()
    run = through(lambda block, _: block)
    ours = train(session.checkpoint, build, run, steps=STEPS, optimizer=optimizer)
    assert differing(ours, train(plainly, build, run, steps=STEPS, optimizer=optimizer)) == []
    assert session.report().fallbacks == 0
    settle(session)
    assert worker.telemetry().speculation_misses - before.speculation_misses == fused * BLOCKS


def test_what_no_worker_takes_is_not_sent_before(
    worker: WorkerProcess, saved: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    with backhaul.connect(worker.address, numerics="exact") as session:
        monkeypatch.setattr(session._dispatcher, "_differences", lambda *_: {"cpu": ("here", "there")})
        linear = nn.Linear(4, 4)
        for _ in range(3):
            session.checkpoint(linear, torch.randn(2, 4)).sum().backward()
        assert saved == []
        assert session.report().fallbacks == 3


def test_a_sparse_tensor_in_place_of_a_dense_one(session: Session, saved: list[bool]) -> None:
    def fn(x: Tensor) -> Tensor:
        return x.sin()

    session.checkpoint(fn, torch.ones(4, 4, requires_grad=True)).sum().backward()
    session.checkpoint(fn, torch.eye(4).to_sparse().requires_grad_())
    assert saved == [False]
    (segment,) = session.report().segments
    assert [*segment.kept] == ["tensor with layout torch.sparse_coo"]
