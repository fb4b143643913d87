"""Functions whose backward draws random numbers, in accumulation blocks: the order of draws is that of a loop."""

import contextlib
import os
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import backhaul
from backhaul import AccumulationError, Session
from backhaul_runtime.program.custom.names import names
from conftest import QUIET
from support import noisy
from support.bits import differing
from support.processes import WorkerProcess

WIDTH = 8
pytestmark = pytest.mark.slow  # it starts a worker that imports torch
ENVIRONMENT = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])}


@pytest.fixture(scope="module")
def allowing() -> Iterator[WorkerProcess]:
    with WorkerProcess("--memory", "512MiB", "--allow", "support.noisy", environment=ENVIRONMENT) as process:
        yield process


@pytest.fixture
def session(allowing: WorkerProcess, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    """A session that has learned nothing of the functions yet."""
    monkeypatch.setattr(names, "denied", {})
    monkeypatch.setattr(names, "proven", set())
    with backhaul.connect(allowing.address, settings=QUIET) as session:
        yield session


def blocks_of(session: Session | None, function: Any, micro_batches: int = 3, blocks: int = 3) -> list[Tensor | None]:
    torch.manual_seed(0)
    random.seed(0)
    layers, gradients = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)), list[Tensor | None]()
    checkpoint = session.checkpoint if session else lambda fn, x: fn(x)
    plain = SimpleNamespace(backward=lambda loss: loss.backward())
    for _ in range(blocks):
        opened: Any = session.accumulate() if session else contextlib.nullcontext(plain)
        with opened as block:
            for _ in range(micro_batches):
                first, *others = layers
                x = first(torch.randn(4, WIDTH))
                for layer in others:
                    x = checkpoint(lambda x, layer=layer: function.apply(layer(x)), x)
                block.backward(x.square().mean())
        gradients += [parameter.grad.clone() for parameter in layers.parameters() if parameter.grad is not None]
        layers.zero_grad()
    return gradients


@pytest.mark.parametrize("function", [noisy.DrawsInBackward, noisy.DrawsFromPython, noisy.Quiet])
def test_the_first_block_has_the_order_of_a_loop(session: Session, function: Any) -> None:
    assert differing(blocks_of(session, function), blocks_of(None, function)) == []


def test_a_function_gets_zeros_where_no_gradient_arrives(session: Session) -> None:
    """Its gradients are zeros then, and not missing, in a block, too."""
    expected = blocks_of(None, noisy.StopsGradients)
    assert [bool(gradient.any()) for gradient in expected if gradient is not None] == [False] * len(expected)
    assert len(expected) == 3 * 4  # without the last of three layers
    assert differing(blocks_of(session, noisy.StopsGradients), expected) == []


@pytest.mark.parametrize("returns", ["gradients", "activations"])
def test_a_segment_that_no_gradient_reaches(session: Session, returns: str) -> None:
    def gradients(checkpoint: Any) -> list[Tensor | None]:
        torch.manual_seed(0)
        x, layers = torch.randn(4, WIDTH, requires_grad=True), [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
        h = x
        for layer in layers:
            h = checkpoint(lambda h, layer=layer: noisy.StopsGradients.apply(layer(h)), h)
        h.sum().backward()
        return [x.grad, *(parameter.grad for layer in layers for parameter in layer.parameters())]

    ours = gradients(lambda function, h: session.checkpoint(function, h, returns=returns))
    assert differing(ours, gradients(lambda function, h: function(h))) == []


def test_a_quiet_function_is_divided_after_its_first_micro_batch(session: Session) -> None:
    blocks_of(session, noisy.Quiet)
    assert "no worker has run the backward of one of its custom functions yet" in str(session.report())
    assert names.proven == {"support.noisy:Quiet"}
    assert session.report().fallbacks == 0


def test_a_function_that_begins_to_draw_ends_the_block_with_an_error(session: Session) -> None:
    """It draws if its gradient is large, which no earlier backward showed."""
    blocks_of(session, noisy.DrawsAtTimes, blocks=1)
    x = torch.randn(4, WIDTH, requires_grad=True)
    with pytest.raises(AccumulationError, match="draws random numbers"), session.accumulate() as block:
        for _ in range(3):
            y = session.checkpoint(lambda x: noisy.DrawsAtTimes.apply(x.sin()), x)
            y = session.checkpoint(lambda x: noisy.DrawsAtTimes.apply(x.sin()), y)
            block.backward(y.sum() * 1e6)
    assert x.grad is None
    assert "support.noisy:DrawsAtTimes" in names.denied
