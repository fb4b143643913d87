"""Whole micro-batches of random networks: whatever runs where, everything has the bits of the plain loop."""

import random
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import backhaul
from backhaul import Session
from backhaul._accumulate.whole_shares import WholeShares
from backhaul._config import LOCALS
from conftest import quiet, wait_until
from numerics.test_random_blocks import WIDTH, Net, kill_worker
from support.bits import differing, plainly, seed_generators
from support.processes import WorkerProcess
from support.whole import alone, whole_in

KILLS = 200
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # torch.compile says what it ignores


@pytest.fixture(autouse=True)
def compiler(fresh_compiler: None) -> Iterator[None]:
    yield


def trained(seed: int, session: Session | None, share: int = 0) -> list[Tensor | None]:
    """Returns losses, gradients, parameters and the generator's state, of steps drawn by the seed."""
    draw = random.Random(seed)
    seed_generators(seed)
    net = Net(draw).to(draw.choice([torch.float32, torch.float32, torch.bfloat16, torch.float64]))
    micro_batches, steps, autocast = draw.randint(4, 7), draw.randint(2, 3), draw.random() < 0.1
    keeps, to_zeros, wants_input = draw.random() < 0.4, draw.random() < 0.3, draw.random() < 0.2
    rows = [draw.choice([3, 3, 3, 5]) for _ in range(micro_batches)]
    checkpoint = plainly if session is None else session.checkpoint
    results: list[Tensor | None] = []
    if not any(parameter.requires_grad for parameter in net.parameters()):
        return results
    for step in range(steps):
        inputs, losses = [], []
        local = LOCALS[seed % 2]
        with alone() if session is None else session.accumulate(local) as block:
            for number in range(micro_batches):
                x = torch.randn(rows[number], WIDTH, dtype=net.scale.dtype).requires_grad_(wants_input)
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast and x.dtype == torch.float32):
                    losses.append(block.run(net.loss, checkpoint, x, number))
                inputs.append(x)
        results += losses
        results += [None if tensor.grad is None else tensor.grad.clone() for tensor in (*inputs, *net.parameters())]
        with torch.no_grad():
            for parameter in net.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=0.01)
        if not keeps or step % 2:
            net.zero_grad(set_to_none=not to_zeros)
        results.append(torch.get_rng_state())
    return [*results, *(parameter.detach() for parameter in net.parameters())]


def has_loss(seed: int) -> bool:
    """Whether each loss of a seed has a graph: one without is an error."""
    try:
        trained(seed, None)
    except RuntimeError:
        return False
    return True


def compare(worker: WorkerProcess, seeds: range) -> None:
    draw = random.Random(seeds[0])
    with backhaul.connect(worker.address, settings=quiet(whole_recheck=0.3)) as session:
        for seed in filter(has_loss, seeds):
            torch._dynamo.reset()
            share = draw.randint(2, 6)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(WholeShares, "first", lambda self, share=share: share)
                assert differing(trained(seed, session), trained(seed, None)) == [], f"seed {seed}"
        assert session.report().fallbacks == 0
        assert whole_in(session) > len(seeds)


@pytest.mark.parametrize("seeds", [range(6), pytest.param(range(6, 30), marks=pytest.mark.nightly)], ids=len)
def test_random_whole_micro_batches(worker: WorkerProcess, seeds: range) -> None:
    compare(worker, seeds)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_many_random_whole_micro_batches(worker: WorkerProcess) -> None:
    compare(worker, range(30, 1030))


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_two_hundred_workers_die_with_whole_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    draw, killed = random.Random(0), 0
    monkeypatch.setattr(WholeShares, "first", lambda self: 6)
    with backhaul.connect(settings=quiet(whole_recheck=0.1)) as session:
        (worker,) = session._workers
        for seed in filter(has_loss, range(1_000)):
            if killed == KILLS:
                break
            torch._dynamo.reset()
            expected = trained(seed, None)
            assert differing(trained(seed, session), expected) == [], f"seed {seed}"  # so that its programs are known
            killing = threading.Timer(draw.uniform(0.0, 0.3), kill_worker, [session])
            killing.start()
            assert differing(trained(seed, session), expected) == [], f"seed {seed}"
            killed += not killing.is_alive()  # else it is killed after the training
            killing.join()
            wait_until(lambda: worker.connection.up is not None, "the worker is back")
        assert killed == KILLS
        assert whole_in(session) > 200
