"""Training over several connections to a worker: the same bits, over the link that needs them."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import backhaul
from backhaul import SettingError
from backhaul_lab.harness.link_proxy import LinkProxy
from conftest import quiet, wait_until
from support.bits import Checkpoint, differing, grad_of, plainly, train
from support.lanes import OVER_TCP, connected, connection_of, counted, joined
from support.processes import WorkerProcess, open_files

WIDTH = 768
"""A layer's weight has 2.25 MiB, so it is striped, and so are its activations and gradients."""


@pytest.fixture(scope="module")
def distant(worker: WorkerProcess) -> Iterator[LinkProxy]:
    """The shared worker behind a link of which one connection fills a small part."""
    with LinkProxy(worker.address, latency_s=0.002, window_bytes=256 << 10) as proxy:
        yield proxy


def build() -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))


def stack(checkpoint: Checkpoint, model: nn.Module) -> tuple[Tensor, list[Tensor]]:
    x = y = torch.randn(WIDTH, WIDTH, requires_grad=True)
    for layer in model:  # type: ignore[attr-defined]
        y = checkpoint(lambda y, layer=layer: layer(y).tanh(), y)
    return y.sum(), [x]


@pytest.fixture(scope="module")
def expected() -> list[Tensor | None]:
    torch.set_num_threads(1)
    return train(plainly, build, stack, steps=1)


@pytest.mark.slow
@pytest.mark.parametrize("connections", [1, 2, 4])
def test_the_bits_are_the_same(
    connections: int, returns: str, distant: LinkProxy, expected: list[Tensor | None]
) -> None:
    with counted() as passed, connected(distant.address, connections) as session:
        assert differing(train(partial(session.checkpoint, returns=returns), build, stack, steps=1), expected) == []
        assert session.report().fallbacks == 0
    assert (passed["PutStripes"] > 0, passed["GetStripes"] > 0) == (connections > 1, connections > 1)


@pytest.mark.slow
def test_sums_of_an_accumulation_block_come_over_all_connections(distant: LinkProxy) -> None:
    def steps(checkpoint: Checkpoint, session: backhaul.Session | None) -> list[Tensor]:
        torch.manual_seed(0)
        model = build()
        if session is None:
            for _ in range(2):
                stack(checkpoint, model)[0].backward()
        else:
            with session.accumulate() as step:
                for _ in range(2):
                    step.backward(stack(checkpoint, model)[0])
        return [grad_of(parameter) for parameter in model.parameters()]

    with counted() as passed, connected(distant.address, 4) as session:
        session._shares["recompute"].trainers_share = lambda: 0  # type: ignore[method-assign]
        assert differing(steps(session.checkpoint, session), steps(plainly, None)) == []
        assert session.report().fallbacks == 0
    assert passed["CollectGradients"] > 0
    assert passed["GetStripes"] > 0


@pytest.mark.slow
def test_differences_go_beside_stripes(worker: WorkerProcess) -> None:
    def steps(checkpoint: Checkpoint) -> list[Tensor]:
        torch.manual_seed(0)
        model, gradients = build(), list[Tensor]()
        stepper = torch.optim.SGD(model.parameters(), lr=1e-4)
        for _ in range(4):
            stack(checkpoint, model)[0].backward()
            gradients += [grad_of(parameter).clone() for parameter in model.parameters()]
            stepper.step()
            stepper.zero_grad()
        return gradients

    with counted() as passed, connected(worker.address, 2, compression="on") as session:
        assert differing(steps(session.checkpoint), steps(plainly)) == []
        assert session.report().fallbacks == 0
        assert session.report().spared_bytes > 0
    assert passed["PutStripes"] > 0


@pytest.mark.parametrize("options", [{}, OVER_TCP], ids=["shared memory", "TCP"])
def test_a_worker_on_this_machine_gets_one_connection(options: dict[str, Any], worker: WorkerProcess) -> None:
    with backhaul.connect(worker.address, settings=backhaul.Settings(**options)) as session:
        choice = connection_of(session).lanes.choice
        wait_until(lambda: choice.is_settled, "a round trip is short enough")  # each keep-alive measures one
        assert choice.count == 1


@pytest.mark.nightly
def test_a_distant_worker_is_tried_with_more_than_one(worker: WorkerProcess) -> None:
    x, scale = torch.randn(1 << 20, requires_grad=True), torch.tensor(2.0)

    def scaled() -> Tensor:
        return (x * scale).sum()

    with (
        LinkProxy(worker.address, latency_s=0.01, window_bytes=256 << 10) as proxy,
        backhaul.connect(proxy.address, settings=quiet(**OVER_TCP)) as session,
    ):
        lanes = connection_of(session).lanes
        assert lanes.choice.count == 1
        for _ in range(60):
            with torch.no_grad():
                x.add_(1.0)
            x.grad = None
            session.checkpoint(scaled).backward()
            assert torch.equal(grad_of(x), torch.full_like(x, 2.0))
            if lanes.choice.count > 1:  # how many it stays with depends on the rates, see test_connection_count.py
                break
        assert lanes.choice.count > 1
        wait_until(lambda: joined(session) >= 1, "a lane joins")


def test_lanes_end_with_their_session(worker: WorkerProcess) -> None:
    before = open_files()
    with connected(worker.address, 8):
        assert open_files() > before + 6
    wait_until(lambda: open_files() <= before, "the connections are closed")


def test_the_number_is_checked() -> None:
    with pytest.raises(SettingError, match="connections=9 must be at most 8"):
        backhaul.connect("localhost:1", settings=backhaul.Settings(connections=9))
    with pytest.raises(SettingError, match="connections=-1 must not be negative"):
        backhaul.connect("localhost:1", settings=backhaul.Settings(connections=-1))
