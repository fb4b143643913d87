"""Gradients that the worker adds up across micro-batches: the sums have the bits of sums on the trainer."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import backhaul
from backhaul import Session
from backhaul._backward.frame import Frame
from backhaul._worker_client.accumulation import UncollectedGradients
from backhaul_proto.v1 import session_pb2
from conftest import QUIET_S, wait_until
from support.bits import Checkpoint, differing, grad_of, plainly
from support.processes import WorkerProcess

BLOCKS, WIDTH = 3, 32
Happen = Callable[[int], None]


@pytest.fixture
def keeping(worker: WorkerProcess) -> Iterator[Session]:
    """A session whose worker accumulates gradients."""
    with backhaul.connect(worker.address, silence_s=QUIET_S, returns="gradients", accumulate="worker") as session:
        yield session
    wait_until(lambda: worker.telemetry().memory.result_bytes == 0, "nothing is kept")


def chain() -> nn.ModuleList:
    return nn.ModuleList(
        nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)) for _ in range(BLOCKS)
    )


def tied() -> nn.ModuleList:
    """A model whose blocks share one weight, and use it twice each."""
    linear = nn.Linear(WIDTH, WIDTH)
    return nn.ModuleList(nn.Sequential(linear, nn.GELU(), linear, nn.LayerNorm(WIDTH)) for _ in range(BLOCKS))


def train(
    checkpoint: Checkpoint,
    build: Callable[[], nn.ModuleList],
    optimizer: Any = torch.optim.SGD,
    micro_batches: int = 3,
    steps: int = 2,
    happen: Happen = lambda passed: None,
) -> list[Tensor | None]:
    """Returns losses, gradients before each step, and final parameters. `happen` is called before each micro-batch."""
    torch.manual_seed(0)
    blocks = build()
    head = nn.Linear(WIDTH, 1)
    parameters = [*blocks.parameters(), *head.parameters()]
    stepper = optimizer(parameters, lr=0.1)
    results: list[Tensor | None] = []
    noted = stepper.register_step_pre_hook(lambda *_: results.extend(grad_of(p).clone() for p in parameters))
    for step in range(steps):
        for micro_batch in range(micro_batches):
            happen(step * micro_batches + micro_batch)
            y = torch.randn(8, WIDTH, requires_grad=True)
            for block in blocks:
                y = checkpoint(block, y)
            loss = head(y).square().mean()
            loss.backward()
            results.append(loss.detach())
        stepper.step()
        stepper.zero_grad()
    noted.remove()
    return [*results, *(parameter.detach() for parameter in parameters)]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("build", [chain, tied])
def test_sums_are_those_of_the_trainer(keeping: Session, build: Any, optimizer: Any) -> None:
    ours = train(keeping.checkpoint, build, optimizer)
    assert differing(ours, train(plainly, build, optimizer)) == []
    assert keeping.report().fallbacks == 0


@pytest.mark.slow
def test_less_comes_back(keeping: Session, worker: WorkerProcess) -> None:
    def received(session: Session) -> int:
        train(session.checkpoint, chain, micro_batches=4)
        return session.report().down_bytes

    with backhaul.connect(worker.address, silence_s=QUIET_S, returns="gradients") as session:
        gradients_bytes = sum(parameter.nbytes for parameter in chain().parameters())
        assert received(session) - received(keeping) > 2 * 3 * gradients_bytes


def test_what_ends_on_the_trainer_counts_once(keeping: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    passed = 0

    def happen(now: int) -> None:
        nonlocal passed
        passed = now

    check = Frame._check

    def failing(self: Frame, *given: Any) -> None:
        if passed == 1:
            raise backhaul.CheckpointError("other values")
        check(self, *given)

    monkeypatch.setattr(Frame, "_check", failing)
    ours = train(keeping.checkpoint, chain, micro_batches=2, happen=happen)
    assert differing(ours, train(plainly, chain, micro_batches=2)) == []
    assert keeping.report().fallbacks == BLOCKS


def test_commits_that_come_again_count_once(keeping: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(UncollectedGradients, "taken", lambda self, commits: None)
    assert differing(train(keeping.checkpoint, chain), train(plainly, chain)) == []


def test_a_collection_cut_off_is_asked_for_again(keeping: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = UncollectedGradients._asked
    cut_off: list[Any] = []

    def cutting(self: UncollectedGradients, worker_session: Any, count: Any) -> Any:
        answer = asked(self, worker_session, count)
        if len(cut_off) % 2 == 0:
            cut_off.append(worker_session)
            raise backhaul.WorkerLostError("cut off", status="UNAVAILABLE")
        cut_off.append(worker_session)
        return answer

    monkeypatch.setattr(UncollectedGradients, "_asked", cutting)
    assert differing(train(keeping.checkpoint, chain), train(plainly, chain)) == []
    assert len(cut_off) == 4


def test_a_graph_that_is_kept(keeping: Session) -> None:
    linear, x = nn.Linear(WIDTH, WIDTH), torch.randn(4, WIDTH)

    def gradients(checkpoint: Checkpoint) -> list[Tensor]:
        linear.zero_grad()
        loss = checkpoint(linear, x).square().mean()
        loss.backward(retain_graph=True)
        (2 * loss).backward()
        keeping.collect()
        return [parameter.grad.clone() for parameter in linear.parameters() if parameter.grad is not None]

    assert differing(gradients(keeping.checkpoint), gradients(plainly)) == []


def test_gradients_that_somebody_else_wants_come_as_ever(keeping: Session) -> None:
    linear, x = nn.Linear(WIDTH, WIDTH), torch.randn(4, WIDTH)
    wanted = torch.autograd.grad(linear(x).square().mean(), linear.weight)
    assert differing(torch.autograd.grad(keeping.checkpoint(linear, x).square().mean(), linear.weight), wanted) == []
    keeping.checkpoint(linear, x).square().mean().backward(inputs=[linear.weight])
    assert torch.equal(grad_of(linear.weight), wanted[0])

    heard: list[Tensor] = []
    linear.weight.register_hook(heard.append)
    linear.bias.register_post_accumulate_grad_hook(lambda bias: heard.append(bias.grad))
    keeping.checkpoint(linear, x).square().mean().backward()
    bias, weight = heard  # the order in which autograd reaches them
    assert torch.equal(weight, wanted[0])
    assert bias.shape == linear.bias.shape


def test_nothing_is_kept_from_those_who_reduce_gradients_in_backward(
    keeping: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    linear = nn.Linear(WIDTH, WIDTH)
    keeping.checkpoint(linear, torch.randn(4, WIDTH)).sum().backward()
    assert linear.weight.grad is not None


def test_an_optimizer_that_computes_gradients_itself(keeping: Session) -> None:
    def trained(checkpoint: Checkpoint) -> list[Tensor]:
        torch.manual_seed(0)
        linear, x = nn.Linear(WIDTH, WIDTH), torch.randn(4, WIDTH)
        optimizer = torch.optim.LBFGS(linear.parameters(), max_iter=3)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = checkpoint(linear, x).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
        return [parameter.detach() for parameter in linear.parameters()]

    assert differing(trained(keeping.checkpoint), trained(plainly)) == []


def test_two_workers(worker: WorkerProcess, own_worker: WorkerProcess) -> None:
    both = f"{worker.address},{own_worker.address}"
    with backhaul.connect(both, silence_s=QUIET_S, returns="gradients", accumulate="worker") as session:
        ours = train(session.checkpoint, chain, micro_batches=2)  # more micro-batches would change the order of the sum
        assert differing(ours, train(plainly, chain, micro_batches=2)) == []
        assert all(worker.uploader.uncollected._round > 1 for worker in session._workers)


@pytest.mark.slow
def test_a_worker_that_dies_with_gradients(own_worker: WorkerProcess) -> None:
    linear, x = nn.Linear(WIDTH, WIDTH), torch.randn(4, WIDTH)
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)
    with backhaul.connect(own_worker.address, silence_s=QUIET_S, accumulate="worker") as session:

        def backward() -> None:
            session.checkpoint(linear, x).square().mean().backward()

        backward()
        before = linear.weight.detach().clone()
        own_worker.kill()
        backward()
        assert linear.weight.grad is not None  # the trainer has computed it
        with pytest.raises(backhaul.GradientsLostError, match="zero_grad") as caught:
            optimizer.step()
        assert caught.value.workers == [own_worker.address]
        assert torch.equal(linear.weight, before)
        optimizer.zero_grad()
        backward()
        optimizer.step()
        assert not torch.equal(linear.weight, before)


def test_a_worker_that_forgot(worker: WorkerProcess) -> None:
    linear, x = nn.Linear(WIDTH, WIDTH), torch.randn(4, WIDTH)
    session = backhaul.connect(worker.address, silence_s=QUIET_S, accumulate="worker")
    connection = session._workers[0].connection

    def backward() -> None:
        session.checkpoint(linear, x).square().mean().backward()

    def forget() -> None:
        worker_session = connection.up
        assert worker_session is not None
        connection.stubs(worker_session).sessions.CloseSession(
            session_pb2.CloseSessionRequest(session=worker_session.session)
        )
        connection._wake.set()
        wait_until(lambda: connection.up not in (None, worker_session), "there is another session")

    backward()
    forget()
    backward()
    assert linear.weight.grad is None
    with pytest.raises(backhaul.GradientsLostError):
        session.collect()
    backward()
    session.collect()
    assert torch.equal(grad_of(linear.weight), torch.autograd.grad(linear(x).square().mean(), linear.weight)[0])
    backward()
    forget()
    with pytest.raises(backhaul.GradientsLostError):
        session.close()
    assert session.closed


def test_closing_collects(worker: WorkerProcess) -> None:
    linear = nn.Linear(WIDTH, WIDTH)
    with backhaul.connect(worker.address, silence_s=QUIET_S, returns="gradients", accumulate="worker") as session:
        session.checkpoint(linear, torch.randn(4, WIDTH)).sum().backward()
        assert linear.weight.grad is None
    assert linear.weight.grad is not None
