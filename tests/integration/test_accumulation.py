"""Accumulation blocks: `.grad` has the bits of the loop with `loss.backward()`, whoever computes what, and when."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import backhaul
from backhaul import Session
from backhaul._accumulate.block import AccumulationBlock
from backhaul._accumulate.plan import Shares
from backhaul._backward.frame import Frame
from backhaul._config import LOCALS, Local
from backhaul._worker_client.answers.uncollected_gradients import UncollectedGradients
from backhaul._worker_client.remote_segment import SavedSegment
from conftest import QUIET, wait_until
from support.bits import Checkpoint, differing, grad_of, plainly
from support.blocks import BLOCKING, DIVIDED, SEGMENTS, WIDTH, Model, as_in_a_loop, loop, take_last, train, trained
from support.devices import NO_SPARSE, on_the_host
from support.processes import WorkerProcess


@pytest.fixture(autouse=True)
def no_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives workers all segments, and equally many: measured times would soon decide otherwise."""
    monkeypatch.setattr(Shares, "trainers_share", lambda self: 0)
    monkeypatch.setattr(Shares, "speeds", {})


@pytest.fixture
def session(worker: WorkerProcess) -> Iterator[Session]:
    with backhaul.connect(worker.address, settings=QUIET) as session:
        yield session
    wait_until(lambda: worker.telemetry().memory.result_bytes == 0, "nothing is kept")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*DIVIDED, *BLOCKING])
def test_gradients_are_those_of_the_loop(session: Session, kind: str) -> None:
    assert differing(trained(session, kind=kind), train(plainly, kind=kind)) == []
    blocked = [reason for segment in session.report().segments for reason in segment.blocked]
    assert bool(blocked) == (kind in BLOCKING)
    assert all(reason.startswith(BLOCKING[kind]) for reason in blocked), blocked
    assert session.report().fallbacks == 0


def test_a_loss_that_a_segment_returns(session: Session) -> None:
    def gradients(checkpoint: Checkpoint, accumulate: Any) -> list[Tensor | None]:
        torch.manual_seed(0)
        linear, x = nn.Linear(WIDTH, WIDTH), torch.randn(8, WIDTH)
        with accumulate() as block:
            for _ in range(2):
                block.backward(checkpoint(lambda: linear(x).tanh().square().mean()))
        return [parameter.grad for parameter in linear.parameters()]

    assert differing(gradients(session.checkpoint, session.accumulate), gradients(plainly, loop)) == []
    blocked = {reason for segment in session.report().segments for reason in segment.blocked}
    assert blocked == {"the loss is itself the output of a segment"}


@pytest.mark.parametrize("is_hooked", [False, True])
def test_what_was_made_before_the_block(session: Session, *, is_hooked: bool) -> None:
    """The block does not know of the hook, which must be called once all the same."""

    def gradients(checkpoint: Checkpoint, accumulate: Any) -> list[Tensor | None]:
        torch.manual_seed(0)
        linear, head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        weight = linear.weight.t()
        y = checkpoint(lambda x: linear(x).tanh(), torch.randn(8, WIDTH))
        if is_hooked:
            weight.register_hook(lambda gradient: gradient * 2)
        with accumulate() as block:
            block.backward((y @ weight if is_hooked else head(y)).square().mean())
        return [parameter.grad for parameter in (*linear.parameters(), *head.parameters())]

    assert differing(gradients(session.checkpoint, session.accumulate), gradients(plainly, loop)) == []
    blocked = [reason for segment in session.report().segments for reason in segment.blocked]
    made_before = "a tensor computed from a parameter of a segment has a hook, or was made before the block"
    assert blocked == [made_before] * is_hooked


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [1, 2, 8])
def test_any_number_of_micro_batches(session: Session, micro_batches: int) -> None:
    ours = trained(session, micro_batches=micro_batches, fused=True)
    assert differing(ours, train(plainly, micro_batches=micro_batches, fused=True)) == []


@pytest.mark.slow
def test_segments_that_return_activations(worker: WorkerProcess) -> None:
    with backhaul.connect(worker.address, returns="activations", settings=QUIET) as session:
        assert differing(trained(session), train(plainly)) == []


@pytest.mark.slow
def test_two_workers(worker: WorkerProcess, own_worker: WorkerProcess) -> None:
    with backhaul.connect(f"{worker.address},{own_worker.address}", settings=QUIET) as session:
        assert differing(trained(session, kind="tied to the head"), train(plainly, kind="tied to the head")) == []
        assert all(worker.uploader.uncollected._round > 1 for worker in session._workers)


@pytest.mark.slow
def test_requests_announce_those_that_follow(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[tuple[int, list[int]]] = []
    backward = SavedSegment.backward

    def noted(self: SavedSegment, *args: Any, **options: Any) -> Any:
        requests.append((self.number, args[6]))
        return backward(self, *args, **options)

    monkeypatch.setattr(SavedSegment, "backward", noted)
    assert differing(trained(session, micro_batches=5, steps=1), train(plainly, micro_batches=5, steps=1)) == []
    numbers = [number for number, _ in requests]
    assert len(set(numbers)) == len(numbers) == 5 * SEGMENTS
    for done, (_, upcoming) in enumerate(requests, 1):
        assert upcoming == numbers[done : done + len(upcoming)]
        assert len(upcoming) >= SEGMENTS - 1 - (done - 1) % SEGMENTS


@pytest.mark.slow
@pytest.mark.parametrize("share", [0, 2])
def test_no_speculative_backward_is_wasted(
    session: Session, worker: WorkerProcess, monkeypatch: pytest.MonkeyPatch, share: int
) -> None:
    monkeypatch.setattr(Shares, "trainers_share", lambda self: share)
    before = worker.telemetry()
    assert differing(trained(session, micro_batches=6), train(plainly, micro_batches=6)) == []
    after = worker.telemetry()
    assert after.speculation_hits > before.speculation_hits
    assert after.speculation_misses == before.speculation_misses


@pytest.mark.slow
def test_runs_of_different_lengths_on_two_workers(worker: WorkerProcess, own_worker: WorkerProcess) -> None:
    def gradients(checkpoint: Checkpoint, accumulate: Any) -> list[Tensor]:
        torch.manual_seed(0)
        segments, results = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6)), list[Tensor]()
        for _ in range(4):
            with accumulate() as step:
                for number in range(6):
                    y = torch.randn(8, WIDTH)
                    for segment in segments[: 6 if number % 2 else 3]:
                        y = checkpoint(segment, y).tanh() if number == 5 else checkpoint(segment, y)
                    loss = y.square().mean()
                    step.backward(loss)
            results += [grad_of(parameter).clone() for parameter in segments.parameters()]
            segments.zero_grad()
        return results

    with backhaul.connect(f"{worker.address},{own_worker.address}", settings=QUIET) as session:
        assert differing(gradients(session.checkpoint, session.accumulate), gradients(plainly, loop)) == []


@pytest.mark.slow
@as_in_a_loop
def test_a_parameter_with_a_part_of_another_gradient(checkpoint: Checkpoint, accumulate: Any) -> list[Tensor]:
    one, other = (nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(2))
    with accumulate() as step:
        for _ in range(4):
            x = torch.randn(8, WIDTH)
            y = checkpoint(lambda x: torch.tanh(x @ one) @ torch.cat([one, other]).view(WIDTH, -1).sin(), x)
            loss = y.square().mean()
            step.backward(loss)
    return [grad_of(one), grad_of(other)]


@as_in_a_loop
def test_backward_under_autocast(checkpoint: Checkpoint, accumulate: Any) -> list[Tensor]:
    model = Model("plain")
    with torch.autocast("cpu", torch.bfloat16), accumulate() as step:
        for _ in range(6):
            with torch.autocast("cpu", enabled=False):
                loss = model.loss(checkpoint, torch.randn(8, WIDTH))
                step.backward(loss)
    return [grad_of(parameter) for parameter in model.parameters() if parameter is not model.scale]


@on_the_host(NO_SPARSE)
@as_in_a_loop
def test_sparse_gradients(checkpoint: Checkpoint, accumulate: Any) -> list[Tensor]:
    embedding, linear = nn.Embedding(16, WIDTH, sparse=True), nn.Linear(WIDTH, WIDTH)
    for _ in range(2):  # the second time with gradients
        with accumulate() as block:
            for _ in range(3):
                loss = checkpoint(linear, embedding(torch.randint(16, (8,)))).square().mean()
                block.backward(loss)
    return [grad_of(embedding.weight).to_dense(), grad_of(linear.weight)]


@pytest.mark.slow
@as_in_a_loop
def test_autocast_and_a_scaler(checkpoint: Checkpoint, accumulate: Any) -> list[Tensor]:
    model, scaler = Model("plain"), torch.amp.GradScaler("cpu", init_scale=1024.0)
    stepper = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2):
        with accumulate() as block:
            for _ in range(3):
                with torch.autocast("cpu", torch.bfloat16):
                    loss = scaler.scale(model.loss(checkpoint, torch.randn(8, WIDTH)))
                block.backward(loss)
        scaler.unscale_(stepper)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(stepper)
        scaler.update()
        stepper.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.slow
@as_in_a_loop
def test_a_loss_that_leads_to_no_parameter(checkpoint: Checkpoint, accumulate: Any) -> list[Tensor]:
    weight, seen = nn.Parameter(torch.ones(3)), list[Tensor]()
    with accumulate() as block:
        for factor in (1.0, 2.0):
            y = checkpoint(lambda x: x * weight, torch.full((2, 3), factor))
            with torch.no_grad():
                view = y.view_as(y)  # requires a gradient, and has no history
            z = view * view
            z.register_hook(seen.append)
            block.backward(z.sum())
    assert weight.grad is None
    return seen


@pytest.mark.slow
@as_in_a_loop
def test_plain_backward_inside_a_block_comes_after_those_before(
    checkpoint: Checkpoint, accumulate: Any
) -> list[Tensor]:
    model = Model("plain")

    with accumulate() as block:
        for number in range(4):
            loss = model.loss(checkpoint, torch.randn(8, WIDTH))
            loss.backward() if number == 2 else block.backward(loss)
    return [grad_of(parameter) for parameter in model.parameters() if parameter is not model.scale]


@pytest.mark.slow
@pytest.mark.parametrize("local", LOCALS)
@pytest.mark.parametrize("share", [1, 2, SEGMENTS])
def test_the_trainers_share(session: Session, monkeypatch: pytest.MonkeyPatch, share: int, local: Local) -> None:
    monkeypatch.setattr(session._shares[local], "trainers_share", lambda: share)
    accumulate = partial(session.accumulate, local)
    assert differing(train(session.checkpoint, accumulate, kind="BatchNorm"), train(plainly, kind="BatchNorm")) == []
    assert session.report().fallbacks == 0
    (segment,) = [segment for segment in session.report().segments if segment.calls]
    # Three steps of three micro-batches. A share begins with the second micro-batch: the first one is counted.
    assert segment.kept == ({"its share of an accumulation block": 8 * share} if local == "keep" else {})


@pytest.mark.slow
@pytest.mark.parametrize("local", LOCALS)
@pytest.mark.parametrize("kind", ["BatchNorm", "tied segments", "hooks on parameters"])
def test_last_segments(session: Session, monkeypatch: pytest.MonkeyPatch, kind: str, local: Local) -> None:
    last = (0, 2, 0, 0, 1, SEGMENTS)
    take_last(monkeypatch, session, local, *last)
    ours = train(session.checkpoint, partial(session.accumulate, local), kind=kind, micro_batches=len(last))
    assert differing(ours, train(plainly, kind=kind, micro_batches=len(last))) == []
    block = session.report().block
    assert block is not None
    # Two segments of one weight can't be divided: the head and the run would both use it.
    assert block.trainer.segments == (0 if kind == "tied segments" else sum(last))


def test_a_failed_value_check_counts_once(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    checks, check = 0, Frame._check

    def failing(self: Frame, *given: Any) -> None:
        nonlocal checks
        checks += 1
        if checks == SEGMENTS + 3:
            raise backhaul.CheckpointError("other values")
        check(self, *given)

    monkeypatch.setattr(Frame, "_check", failing)
    assert differing(trained(session), train(plainly)) == []
    assert session.report().fallbacks == 1


def test_commits_that_come_again_count_once(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(UncollectedGradients, "taken", lambda self, commits: None)
    assert differing(trained(session), train(plainly)) == []


@pytest.mark.parametrize("kind", ["plain", "SiLU"])  # with create_graph=True SiLU's backward gives other bits
def test_sums_that_do_not_arrive_are_computed_again(
    session: Session, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    def losing(self: UncollectedGradients, *_: Any) -> Any:
        raise backhaul.WorkerLostError("lost", status="LOST")

    monkeypatch.setattr(UncollectedGradients, "_collected", losing)
    assert differing(trained(session, kind=kind), train(plainly, kind=kind)) == []
    assert session.report().fallbacks == 2  # the step that begins with gradients keeps none on the worker
    assert "create_graph" not in str(session.report())


@pytest.mark.slow
@pytest.mark.parametrize(("at", "durability"), [*((at, "lineage") for at in range(4)), (2, "host"), (2, "none")])
def test_a_worker_that_dies(own_worker: WorkerProcess, at: int, durability: Any) -> None:
    def happen(number: int, block: Any) -> None:
        if number == at and isinstance(block, AccumulationBlock) and own_worker.process.poll() is None:
            own_worker.kill()

    with backhaul.connect(own_worker.address, durability=durability, settings=QUIET) as session:
        try:
            ours = trained(session, micro_batches=4, happen=happen)
        except backhaul.SegmentLostError:
            assert durability == "none"
        else:
            assert differing(ours, train(plainly, micro_batches=4)) == []
            assert "create_graph" not in str(session.report())  # no graph of the backward was recorded
