"""A worker that answers one request with the answer to another."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import backhaul
from conftest import RETURNS
from faults.test_lies import Liar
from support.bits import differing
from support.flips import on_every_channel
from support.processes import WorkerProcess


@pytest.mark.slow
@pytest.mark.parametrize("returns", RETURNS)
def test_answers_to_another_request_are_not_taken(returns: str, worker: WorkerProcess) -> None:
    """Two threads ask for the same backward from other gradients, so the layouts and digests of answers are equal."""
    layer, x, count, liar = nn.Linear(6, 6), torch.randn(4, 6, requires_grad=True), 8, Liar()

    def swap(answer: Any) -> None:
        answer.message.number ^= liar.lies % 2

    def gradients(factor: int) -> list[torch.Tensor]:
        y = session.checkpoint(lambda h: layer(h).sin().exp(), x, returns=returns)
        return list(torch.autograd.grad(y, x, torch.full_like(y, float(factor))))

    def block(factor: int) -> list[torch.Tensor]:
        y = layer(x).sin().exp()
        return list(torch.autograd.grad(y, x, torch.full_like(y, float(factor))))

    liar.change = swap
    # An answer that reaches nobody is noticed by the silence of the worker.
    with (
        on_every_channel(liar),
        backhaul.connect(worker.address, settings=backhaul.Settings(silence_s=0.5)) as session,
        ThreadPoolExecutor(2) as threads,
    ):
        results = list(threads.map(gradients, range(count)))
    assert [differing(result, block(factor)) for factor, result in enumerate(results)] == [[]] * count
    assert liar.lies > 1
