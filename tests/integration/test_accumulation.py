"""Accumulation blocks: `.grad` has the bits of the loop with `loss.backward()`, whoever computes what, and when."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
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
from conftest import QUIET, quiet, wait_until
from support.bits import Checkpoint, differing, grad_of, plainly
from support.devices import NO_SPARSE, on_the_host
from support.processes import WorkerProcess

SEGMENTS, WIDTH = 4, 32
Loss = Callable[[Checkpoint, Tensor], Tensor]


@pytest.fixture(autouse=True)
def no_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives workers all segments, and equally many: measured times would soon decide otherwise."""
    monkeypatch.setattr(Shares, "trainers_share", lambda self: 0)
    monkeypatch.setattr(Shares, "speeds", {})


def take_last(monkeypatch: pytest.MonkeyPatch, session: Session, local: Local, *last: int) -> None:
    """Lets the trainer compute so many of the last segments of each micro-batch of a block."""
    chosen = dict(enumerate(last, 1))
    monkeypatch.setattr(
        session._shares[local], "last_segments", lambda micro_batch, parts, left, own: chosen.get(micro_batch, 0)
    )


@pytest.fixture
def session(worker: WorkerProcess) -> Iterator[Session]:
    with backhaul.connect(worker.address, settings=QUIET) as session:
        yield session
    wait_until(lambda: worker.telemetry().memory.result_bytes == 0, "nothing is kept")


def halve_gradient(parameter: Tensor) -> None:
    grad_of(parameter).mul_(0.5)


class Model(nn.Module):
    """An embedding, segments and a head. `kind` says what is unusual about it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embedding, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.linears = [nn.Linear(WIDTH, WIDTH) for _ in range(SEGMENTS)]
        if kind in ("tied to the head", "hook between the head and its tied weight"):
            self.head.weight = self.embedding.weight
        if kind == "tied segments":
            for linear in self.linears:
                linear.weight = self.embedding.weight
        norm = nn.BatchNorm1d if kind == "BatchNorm" else nn.LayerNorm
        self.segments = nn.ModuleList(
            nn.Sequential(norm(WIDTH), linear, nn.SiLU() if kind == "SiLU" else nn.GELU(), nn.Dropout(0.1))
            for linear in self.linears
        )
        self.scale = nn.Parameter(torch.ones(WIDTH))
        if kind == "hooks on parameters":
            self.embedding.weight.register_hook(lambda gradient: gradient * 1.5)
            self.linears[1].weight.register_hook(lambda gradient: gradient + 0.125)
            self.head.bias.register_post_accumulate_grad_hook(halve_gradient)
        if kind == "frozen":
            for parameter in self.parameters():
                parameter.requires_grad_(False)
            for linear in self.linears:
                linear.bias.requires_grad_()

    def loss(self, checkpoint: Checkpoint, x: Tensor) -> Tensor:
        first = y = self.embedding(x)
        auxiliary: Tensor | float = 0.0
        for number, segment in enumerate(self.segments):
            y = checkpoint(segment, y)
            if self.kind == "operations between":
                y = y * self.scale + 1
            if self.kind == "auxiliary loss" and number == 1:
                auxiliary = y.square().mean()
            if self.kind == "hook on a boundary" and number == 1:
                y.register_hook(lambda gradient: gradient * 1.25)
            if self.kind == "skip":
                y = y + first
        if self.kind == "skip around":
            y = y + first
        if self.kind == "scale of the last boundary":
            y = y * self.scale * self.linears[0].bias
        if self.kind == "hook between the head and its tied weight":
            weight = self.head.weight.t()
            weight.register_hook(lambda gradient: gradient * 2)
            return (y @ weight).square().mean()
        return self.head(y).square().mean() + auxiliary


KINDS = [
    "plain",
    "tied to the head",
    "hook between the head and its tied weight",
    "tied segments",
    "hooks on parameters",
    "BatchNorm",
    "frozen",
    "operations between",
    "auxiliary loss",
    "hook on a boundary",
    "skip",
    "skip around",
    "scale of the last boundary",
]
BLOCKING = {
    "hook between the head and its tied weight",
    "operations between",
    "auxiliary loss",
    "skip",
    "skip around",
    "scale of the last boundary",
}


def train(
    checkpoint: Checkpoint,
    accumulate: Any = None,
    kind: str = "plain",
    micro_batches: int = 3,
    steps: int = 3,
    optimizer: Any = torch.optim.AdamW,
    happen: Callable[[int, AccumulationBlock | None], None] = lambda number, block: None,
    **options: Any,
) -> list[Tensor | None]:
    """Returns losses, gradients of each step, buffers and parameters. Every other step begins with gradients."""
    torch.manual_seed(0)
    model = Model(kind)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    stepper = optimizer(parameters, lr=0.01, **options)
    results: list[Tensor | None] = []

    def run(block: AccumulationBlock | None) -> None:
        for number in range(micro_batches):
            happen(number, block)
            loss = model.loss(checkpoint, torch.randn(8, WIDTH)) / micro_batches
            results.append(loss.detach())
            loss.backward() if block is None else block.backward(loss)

    for step in range(steps):
        if accumulate is None:
            run(None)
        else:
            with accumulate() as block:
                run(block)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        results += [None if parameter.grad is None else parameter.grad.clone() for parameter in parameters]
        stepper.step()
        if step % 2 == 0:
            stepper.zero_grad()
    return [*results, *(tensor.detach().clone() for tensor in model.state_dict().values()), torch.get_rng_state()]


def trained(session: Session, **options: Any) -> list[Tensor | None]:
    return train(session.checkpoint, session.accumulate, **options)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_loop(session: Session, kind: str) -> None:
    assert differing(trained(session, kind=kind), train(plainly, kind=kind)) == []
    blocked = {reason for segment in session.report().segments for reason in segment.blocked}
    assert bool(blocked) == (kind in BLOCKING)
    assert session.report().fallbacks == 0


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
    def gradients(checkpoint: Checkpoint, session: Session | None) -> list[Tensor]:
        torch.manual_seed(0)
        segments, results = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6)), list[Tensor]()
        for _ in range(4):
            block = session.accumulate() if session is not None else nullcontext()
            with block as step:
                for number in range(6):
                    y = torch.randn(8, WIDTH)
                    for segment in segments[: 6 if number % 2 else 3]:
                        y = checkpoint(segment, y).tanh() if number == 5 else checkpoint(segment, y)
                    loss = y.square().mean()
                    loss.backward() if step is None else step.backward(loss)
            results += [grad_of(parameter).clone() for parameter in segments.parameters()]
            segments.zero_grad()
        return results

    with backhaul.connect(f"{worker.address},{own_worker.address}", settings=QUIET) as session:
        assert differing(gradients(session.checkpoint, session), gradients(plainly, None)) == []


@pytest.mark.slow
def test_a_parameter_with_a_part_of_another_gradient(session: Session) -> None:
    def gradients(checkpoint: Checkpoint, accumulate: Any = None) -> list[Tensor]:
        torch.manual_seed(0)
        one, other = (nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(2))
        with nullcontext() if accumulate is None else accumulate() as step:
            for _ in range(4):
                x = torch.randn(8, WIDTH)
                y = checkpoint(lambda x: torch.tanh(x @ one) @ torch.cat([one, other]).view(WIDTH, -1).sin(), x)
                loss = y.square().mean()
                loss.backward() if step is None else step.backward(loss)
        return [grad_of(one), grad_of(other)]

    assert differing(gradients(session.checkpoint, session.accumulate), gradients(plainly)) == []


def test_backward_under_autocast(session: Session) -> None:
    def gradients(checkpoint: Checkpoint, accumulate: Any = None) -> list[Tensor]:
        torch.manual_seed(0)
        model = Model("plain")
        with torch.autocast("cpu", torch.bfloat16), nullcontext() if accumulate is None else accumulate() as step:
            for _ in range(6):
                with torch.autocast("cpu", enabled=False):
                    loss = model.loss(checkpoint, torch.randn(8, WIDTH))
                    loss.backward() if step is None else step.backward(loss)
        return [grad_of(parameter) for parameter in model.parameters() if parameter is not model.scale]

    assert differing(gradients(session.checkpoint, session.accumulate), gradients(plainly)) == []


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


def test_a_segment_that_changes_hands_leaves_one_sum_on_the_worker(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    def held_bytes(*last: int) -> int:
        take_last(monkeypatch, session, "recompute", *last)
        trained(session, micro_batches=6, steps=1)
        block = session.report().block
        assert block is not None
        return block.held_bytes - block.segment_bytes * last[-1]

    trained(session, steps=1)  # in the first micro-batch the number of segments is unknown
    others_bytes = held_bytes(0)
    assert held_bytes(0, 0, 0, 0, 0, 1) == others_bytes
    # The gradients of the last two micro-batches must follow the worker's sum, so they cannot be added to each other.
    assert held_bytes(0, 0, 0, 0, 1, 1) > others_bytes


def test_the_split_keeps_to_what_may_be_held_back(worker: WorkerProcess) -> None:
    with backhaul.connect(worker.address, settings=quiet(held_bytes=1)) as session:
        shares = session._shares["recompute"]
        assert shares.trainers_share() == 0
    with backhaul.connect(worker.address, settings=quiet(held_bytes=1 << 20)) as session:
        shares = session._shares["recompute"]
        for _ in range(4):
            trained(session, micro_batches=8, steps=1)
            block = session.report().block
            assert block is not None
            assert 0 < block.held_bytes <= 1 << 20
            assert shares.last_segments(8, {}, {}, 0) == 0  # because that holds back more


@pytest.mark.slow
@pytest.mark.parametrize("local", LOCALS)
def test_what_unfinished_micro_batches_hold_is_bounded(
    worker: WorkerProcess, monkeypatch: pytest.MonkeyPatch, local: Local
) -> None:
    def deferred_bytes(most_bytes: int) -> int:
        with backhaul.connect(worker.address, settings=quiet(deferred_bytes=most_bytes)) as session:
            monkeypatch.setattr(session._shares[local], "trainers_share", lambda: 2)
            ours = train(session.checkpoint, partial(session.accumulate, local), micro_batches=6)
            assert differing(ours, train(plainly, micro_batches=6)) == []
            block = session.report().block
        assert block is not None
        return block.deferred_bytes

    unbounded = deferred_bytes(0)
    assert 0 < deferred_bytes(unbounded // 2) <= unbounded // 2
    assert deferred_bytes(1) == 0  # each backward waits for all of its gradients


def test_kept_activations_count_as_held(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    def deferred_bytes(local: Local) -> int:
        monkeypatch.setattr(session._shares[local], "trainers_share", lambda: 2)
        for _ in range(2):  # the first micro-batch shows how many segments there are
            train(session.checkpoint, partial(session.accumulate, local), steps=1)
        block = session.report().block
        assert block is not None
        return block.deferred_bytes

    assert deferred_bytes("keep") > deferred_bytes("recompute") > 0


@pytest.mark.parametrize("local", LOCALS)
def test_a_micro_batch_of_the_trainer_alone_is_finished_at_once(
    session: Session, monkeypatch: pytest.MonkeyPatch, local: Local
) -> None:
    monkeypatch.setattr(session._shares[local], "trainers_share", lambda: 1000)
    expected = train(plainly, micro_batches=6, steps=2)
    assert (
        differing(train(session.checkpoint, partial(session.accumulate, local), micro_batches=6, steps=2), expected)
        == []
    )
    block = session.report().block
    assert block is not None
    assert (block.deferred_bytes, block.workers) == (0, {})


def test_gradients_that_are_held_back_are_bounded(worker: WorkerProcess) -> None:
    with backhaul.connect(worker.address, settings=QUIET) as session:
        trained(session, kind="hooks on parameters", steps=1)
        block = session.report().block
        assert block is not None
        most_bytes = block.held_bytes
    with (
        backhaul.connect(worker.address, settings=quiet(held_bytes=most_bytes - 1)) as session,
        pytest.raises(backhaul.AccumulationError, match="held_bytes allows"),
    ):
        trained(session, kind="hooks on parameters", steps=1)


def test_a_block_that_begins_with_gradients_holds_no_more_for_more_micro_batches(session: Session) -> None:
    def held_bytes(micro_batches: int) -> int:
        trained(session, micro_batches=micro_batches, steps=2)  # only the second step begins with gradients
        block = session.report().block
        assert block is not None
        return block.held_bytes

    assert 0 < held_bytes(3) == held_bytes(8)


@on_the_host(NO_SPARSE)
def test_sparse_gradients(session: Session) -> None:
    def gradients(checkpoint: Checkpoint, accumulate: Any = None) -> list[Tensor]:
        torch.manual_seed(0)
        embedding, linear = nn.Embedding(16, WIDTH, sparse=True), nn.Linear(WIDTH, WIDTH)
        for _ in range(2):  # the second time with gradients
            with accumulate() if accumulate is not None else nullcontext() as block:
                for _ in range(3):
                    loss = checkpoint(linear, embedding(torch.randint(16, (8,)))).square().mean()
                    loss.backward() if block is None else block.backward(loss)
        return [grad_of(embedding.weight).to_dense(), grad_of(linear.weight)]

    assert differing(gradients(session.checkpoint, session.accumulate), gradients(plainly)) == []


def test_the_report_shows_who_computed_what(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session._shares["recompute"], "trainers_share", lambda: 1)
    trained(session, steps=2)
    block = session.report().block
    assert block is not None
    assert (block.micro_batches, block.segments, block.trainer.segments) == (3, 3 * SEGMENTS, 3)
    assert [worker.segments for worker in block.workers.values()] == [3 * (SEGMENTS - 1)]
    assert "last accumulation block: 3 micro-batches" in str(session.report())


def test_a_plain_backward_in_a_block_ends_its_micro_batch(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session._shares["recompute"], "trainers_share", lambda: 2)
    trained(session, steps=1)
    model = Model("plain")
    with session.accumulate() as block:
        for number in range(4):
            loss = model.loss(session.checkpoint, torch.randn(8, WIDTH))
            loss.backward() if number == 1 else block.backward(loss)
    report = session.report().block
    assert report is not None
    assert (report.micro_batches, report.chain, report.segments) == (3, SEGMENTS, 3 * SEGMENTS)
    assert report.trainer.segments == 3 * 2


def test_an_unknown_way_to_compute_the_share(session: Session) -> None:
    with pytest.raises(ValueError, match="'recompute', 'keep'"), session.accumulate("drop"):  # type: ignore[arg-type]
        pass


@pytest.mark.slow
def test_autocast_and_a_scaler(session: Session) -> None:
    def scaled(checkpoint: Checkpoint, accumulate: Any = None) -> list[Tensor]:
        torch.manual_seed(0)
        model, scaler = Model("plain"), torch.amp.GradScaler("cpu", init_scale=1024.0)
        stepper = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(2):
            losses = []
            for _ in range(3):
                x = torch.randn(8, WIDTH)
                losses.append(x)

            def loss(x: Tensor) -> Tensor:
                with torch.autocast("cpu", torch.bfloat16):
                    return scaler.scale(model.loss(checkpoint, x))

            if accumulate is None:
                for x in losses:
                    loss(x).backward()
            else:
                with accumulate() as block:
                    for x in losses:
                        block.backward(loss(x))
            scaler.unscale_(stepper)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(stepper)
            scaler.update()
            stepper.zero_grad()
        return [parameter.detach() for parameter in model.parameters()]

    assert differing(scaled(session.checkpoint, session.accumulate), scaled(plainly)) == []


@pytest.mark.slow
def test_plain_backward_inside_a_block_comes_after_those_before(session: Session) -> None:
    def gradients(checkpoint: Checkpoint, accumulate: Any = None) -> list[Tensor]:
        torch.manual_seed(0)
        model = Model("plain")

        def losses() -> Iterator[Tensor]:
            for _ in range(4):
                yield model.loss(checkpoint, torch.randn(8, WIDTH))

        if accumulate is None:
            for loss in losses():
                loss.backward()
        else:
            with accumulate() as block:
                for number, loss in enumerate(losses()):
                    loss.backward() if number == 2 else block.backward(loss)
        return [grad_of(parameter) for parameter in model.parameters() if parameter is not model.scale]

    assert differing(gradients(session.checkpoint, session.accumulate), gradients(plainly)) == []


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
@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize("durability", ["lineage", "host", "none"])
def test_a_worker_that_dies(own_worker: WorkerProcess, at: int, durability: Any) -> None:
    def happen(number: int, block: AccumulationBlock | None) -> None:
        if number == at and block is not None and own_worker.process.poll() is None:
            own_worker.kill()

    with backhaul.connect(own_worker.address, durability=durability, settings=QUIET) as session:
        try:
            ours = trained(session, micro_batches=4, happen=happen)
        except backhaul.SegmentLostError:
            assert durability == "none"
        else:
            assert differing(ours, train(plainly, micro_batches=4)) == []
            assert "create_graph" not in str(session.report())  # no graph of the backward was recorded


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


def test_nothing_is_replaced_without_a_block(session: Session) -> None:
    names = [(torch.autograd, "backward"), (torch.amp.GradScaler, "step"), (torch.amp.GradScaler, "unscale_")]
    own = [getattr(owner, name) for owner, name in names]
    with session.accumulate():
        assert all(getattr(owner, name) is not before for (owner, name), before in zip(names, own, strict=True))
    assert [getattr(owner, name) for owner, name in names] == own


def test_a_loss_can_be_used_only_once(session: Session) -> None:
    model = Model("plain")
    with pytest.raises(RuntimeError, match="second time"), session.accumulate() as block:
        loss = model.loss(session.checkpoint, torch.randn(8, WIDTH))
        block.backward(loss)
        block.backward(loss)
    assert model.head.weight.grad is None


def test_less_comes_back(session: Session) -> None:
    def received(run: Callable[..., Any]) -> int:
        before = session.report().down_bytes
        run(micro_batches=4, steps=1)
        return session.report().down_bytes - before

    gradients_bytes = sum(parameter.nbytes for parameter in Model("plain").segments.parameters())
    plain = received(lambda **options: train(session.checkpoint, **options))
    assert plain - received(lambda **options: trained(session, **options)) > 2 * gradients_bytes
