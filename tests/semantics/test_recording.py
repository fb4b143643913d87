"""Every call's program is its own: what Python decides between two calls is in it, and two live forwards differ."""

import random
from typing import Any

import pytest
from torch import Tensor, nn

from backhaul import Decision, Session
from backhaul._worker_client.upload.segment_upload import SegmentUpload
from support.bits import Checkpoint
from support.calls import WIDTH, inputs, same


class Residual(nn.Module):
    """A layer that is left out at random, by Python's own generator."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.gain = 1.0

    def forward(self, h: Tensor) -> Tensor:
        return h + self.linear(h).tanh() * self.gain

    def skipping(self, h: Tensor) -> Tensor:
        return self(h) if random.random() < 0.5 else h * 1.0


def gradients(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    return [x.grad, *(parameter.grad for parameter in model.parameters())]


def stochastic_depth(checkpoint: Checkpoint) -> list[Tensor | None]:
    layers, (x, h) = nn.ModuleList(Residual() for _ in range(8)), inputs()
    for layer in layers:
        h = checkpoint(layer.skipping, h)
    h.square().sum().backward()
    return gradients(layers, x)


def lambdas_in_a_loop(checkpoint: Checkpoint) -> list[Tensor | None]:
    layers, (x, h) = nn.ModuleList(Residual() for _ in range(4)), inputs()
    for number, layer in enumerate(layers):
        # Late binding: called again after the loop, each would use the last layer.
        h = checkpoint(lambda h: layer(h) * (number + 1), h)  # noqa: B023
    h.square().sum().backward()
    return gradients(layers, x)


@pytest.mark.parametrize("returns", ["gradients", "activations"])
@pytest.mark.parametrize("case", [stochastic_depth, lambdas_in_a_loop])
def test_a_calls_program_is_its_own(case: Any, returns: str, session: Session) -> None:
    same(case, lambda fn, *args: session.checkpoint(fn, *args, returns=returns))
    report = session.report()
    assert report.fallbacks == 0
    expected = {Decision.GRADIENTS if returns == "gradients" else Decision.ACTIVATIONS}
    assert {decision for segment in report.segments for decision in segment.decisions} == expected


def test_equal_calls_are_one_program(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """What differs between calls is in the program; what doesn't travels once."""
    sent: set[bytes] = set()
    worker = session._workers[0]
    save = worker.uploader.save

    def noted(upload: SegmentUpload) -> None:
        sent.add(upload.program_address)
        save(upload)

    monkeypatch.setattr(worker.uploader, "save", noted)
    layer, (_, h) = Residual(), inputs()
    for gain in (1.0, 1.0, 2.0, 1.0):
        layer.gain = gain
        session.checkpoint(layer, h).sum().backward(retain_graph=True)
    assert len(sent) == 2
