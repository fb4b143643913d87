"""Training over a distant link: tensors of several messages, and the same bits."""

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import backhaul
from backhaul_lab.harness.link_proxy import LinkProxy
from conftest import quiet
from support.bits import Checkpoint, differing, grad_of, plainly, train
from support.flips import counted
from support.processes import WorkerProcess

WIDTH = 768
"""A layer's weight has 2.25 MiB, so it travels in several messages, as its activations and gradients do."""


@pytest.fixture(scope="module")
def distant(worker: WorkerProcess) -> Iterator[LinkProxy]:
    """The shared worker behind a link with a small window."""
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
def test_the_bits_are_the_same(returns: str, distant: LinkProxy, expected: list[Tensor | None]) -> None:
    with counted() as passed, backhaul.connect(distant.address, settings=quiet()) as session:
        assert differing(train(partial(session.checkpoint, returns=returns), build, stack, steps=1), expected) == []
        assert session.report().fallbacks == 0
    assert passed["PutTensors"] > 2


@pytest.mark.slow
def test_sums_of_an_accumulation_block_are_the_same(distant: LinkProxy) -> None:
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

    with counted() as passed, backhaul.connect(distant.address, settings=quiet()) as session:
        session._shares["recompute"].trainers_share = lambda: 0  # type: ignore[method-assign]
        assert differing(steps(session.checkpoint, session), steps(plainly, None)) == []
        assert session.report().fallbacks == 0
    assert passed["collect_gradients"] + passed["tensors"] > 2
