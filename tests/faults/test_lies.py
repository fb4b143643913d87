"""A worker whose answers are well formed and sealed, but wrong."""

from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import backhaul
from backhaul import Session
from backhaul_proto.v1 import segment_pb2
from backhaul_runtime.wire.splicing import serialize
from conftest import QUIET
from support.bits import differing, plainly
from support.flips import on_every_channel
from support.processes import WorkerProcess

ANSWERS = {"backward", "recompute", "pushed"}
Change = Callable[[Any], object]


class Liar:
    """Changes each result in the answers to a trainer, and seals the answer again.

    Attributes:
        change: Is given the message.
        lies: So many results.
    """

    def __init__(self) -> None:
        self.change: Change = lambda _: None
        self.lies = 0

    def __call__(self, direction: str, method: str, data: bytes) -> bytes:
        if direction == "up" or method not in ANSWERS:
            return data
        message = segment_pb2.Answer.FromString(data)
        message.ClearField("checksum")
        for answer in (message, *message.more):
            self.lies += 1
            result = getattr(answer, answer.WhichOneof("answer") or "")
            self.change(SimpleNamespace(message=answer, result=result, tensors=answer.tensors))
        return serialize(message)


@pytest.fixture(scope="module")
def liar() -> Liar:
    return Liar()


@pytest.fixture(scope="module")
def lied_to(liar: Liar, worker: WorkerProcess) -> Iterator[Session]:
    with on_every_channel(liar), backhaul.connect(worker.address, settings=QUIET) as session:
        yield session


def position_of_a_gradient(answer: Any) -> None:
    answer.result.contributions[0].view.position += 1


def tensor_of_a_gradient(answer: Any) -> None:
    views = [contribution.view for contribution in answer.result.contributions]
    views[1].tensor, views[2].tensor = views[2].tensor, views[1].tensor


def no_view(answer: Any) -> None:
    answer.result.contributions[0].ClearField("view")


def no_contribution(answer: Any) -> None:
    del answer.result.contributions[0]


def another_shape(answer: Any) -> None:
    for declaration in answer.tensors.declarations:
        declaration.spec.shape[:] = [*declaration.spec.shape, 1]
        declaration.spec.strides[:] = [*declaration.spec.strides, 1]


def another_dtype(answer: Any) -> None:
    for declaration in answer.tensors.declarations:
        declaration.spec.dtype = "int32"


def contribution_kept(answer: Any) -> None:
    answer.result.contributions[0].ClearField("view")
    answer.result.contributions[0].uncollected = True


GRADIENTS = [
    *(position_of_a_gradient, tensor_of_a_gradient, no_view, no_contribution, another_shape, another_dtype),
    contribution_kept,
]


def position_of_a_saved_tensor(answer: Any) -> None:
    answer.result.views[0].position += 1


def one_saved_tensor_twice(answer: Any) -> None:
    answer.result.views[0].position = answer.result.views[1].position


def tensor_of_a_saved_tensor(answer: Any) -> None:
    views = answer.result.views
    views[0].tensor, views[-1].tensor = views[-1].tensor, views[0].tensor


def no_saved_tensor(answer: Any) -> None:
    del answer.result.views[0]


def no_digest(answer: Any) -> None:
    del answer.result.digests[0]


ACTIVATIONS = [
    *(position_of_a_saved_tensor, one_saved_tensor_twice, no_saved_tensor, no_digest, another_shape, another_dtype),
]
CASES = [
    *(("gradients", "default", change) for change in GRADIENTS),
    *(("activations", "default", change) for change in ACTIVATIONS),
    ("activations", "bytes", tensor_of_a_saved_tensor),  # several have the same layout, so only their bytes differ
]


@pytest.mark.parametrize(("returns", "check", "change"), CASES, ids=[change.__name__ for *_, change in CASES])
def test_what_was_not_asked_for_is_not_taken(
    returns: str, check: str, change: Change, liar: Liar, lied_to: Session
) -> None:
    layers = [nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 5)), nn.Linear(5, 6), nn.Linear(6, 6)]
    x = torch.randn(4, 6, requires_grad=True)

    def gradients(checkpoint: Any) -> list[torch.Tensor]:
        h = x
        for layer in layers:
            h = checkpoint(lambda h, layer=layer: layer(h).sin().exp(), h)
        return list(torch.autograd.grad(h.sum(), [x, *(p for layer in layers for p in layer.parameters())]))

    lies, fallbacks, liar.change = liar.lies, lied_to.report().fallbacks, change
    results = gradients(partial(lied_to.checkpoint, returns=returns, determinism_check=check))
    assert differing(results, gradients(plainly)) == []
    assert liar.lies > lies
    assert lied_to.report().fallbacks - fallbacks == len(layers), lied_to.report()
