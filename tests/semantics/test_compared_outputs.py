"""determinism_check="outputs": only what known segments return is compared with a recomputation."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import backhaul
from backhaul import CheckpointError, Settings
from backhaul_runtime.replay.replay import Replay
from conftest import QUIET
from support.bits import Checkpoint, differing, plainly
from support.calls import seed
from support.compiled import MARKS, WIDTH, block_like, inputs, known, own, step, user
from support.devices import DEVICE
from support.loopback import Loopback
from support.processes import WorkerProcess

pytestmark = MARKS


class Scaled(nn.Module):
    """Multiplies a sum by a weight, which is 0 in the first column."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(WIDTH, dtype=torch.float32, device=DEVICE))

    def forward(self, x: Tensor) -> Tensor:
        return (x + 1) * self.weight


def flip_results(monkeypatch: pytest.MonkeyPatch, op_name: str, column: int, *, on_trainer: bool = False) -> None:
    """Makes replays on the worker, or on the trainer, compute one other bit in a column of what an op returns."""
    original = Replay._results

    def results(self: Replay, op: Any, node: Any, *args: Any) -> list[Tensor]:
        returned = original(self, op, node, *args)
        if node.op.startswith(op_name) and self._is_own is on_trainer:
            returned[0].data[..., column].view(torch.int32).bitwise_xor_(1 << 22)
        return returned

    monkeypatch.setattr(Replay, "_results", results)


def gradients(checkpoint: Checkpoint, module: nn.Module) -> list[Tensor | None]:
    seed()
    x = inputs()
    module.zero_grad()
    checkpoint(module, x).sum().backward()
    return [x.grad, *(parameter.grad for parameter in module.parameters())]


def after_known_calls(**options: Any) -> tuple[Loopback, Checkpoint, Scaled]:
    remote, module = Loopback(), Scaled()
    checkpoint = own(remote, **options)
    for _ in range(3):
        gradients(checkpoint, module)
    return remote, checkpoint, module


@pytest.mark.slow
@pytest.mark.parametrize("way", [own, user])
def test_only_what_is_returned_and_what_lies_in_a_source_has_a_digest(way: Callable[..., Checkpoint]) -> None:
    remote, block, x = Loopback(), block_like(), inputs()
    checkpoint = functools.partial(way(remote), determinism_check="outputs")
    for seed_number in range(4):
        assert not differing(step(plainly, block, x, seed_number), step(checkpoint, block, x, seed_number))
    assert known(remote)
    recorded, last = remote.recordings[0], remote.recordings[-1]
    assert recorded.returned is None
    assert all(saved.digest for saved in recorded.saved)
    assert last.returned is not None
    assert [bool(saved.digest) for saved in last.returned] == [True]
    assert [bool(saved.digest) for saved in last.saved] == [saved.source >= 0 for saved in last.saved]


def test_another_bit_in_what_the_worker_returns_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    remote, checkpoint, module = after_known_calls(determinism_check="outputs")
    flip_results(monkeypatch, "aten.mul", 1)
    assert not differing(gradients(checkpoint, module), gradients(plainly, module))
    (segment,) = remote.report().segments
    (reason,) = segment.reasons
    assert "1 of 1 tensors differ between forward and recomputation on the worker" in reason


@pytest.mark.parametrize(("check", "is_found"), [("values", True), ("outputs", False)])
def test_another_bit_that_no_output_shows(check: str, is_found: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum is multiplied by 0 there, so only the gradient of the weight depends on it."""
    remote, checkpoint, module = after_known_calls(determinism_check=check)
    flip_results(monkeypatch, "aten.add", 0)
    given = gradients(checkpoint, module)
    (segment,) = remote.report().segments
    assert segment.fallbacks == is_found
    assert bool(differing(given, gradients(plainly, module))) is not is_found


def test_another_bit_in_what_the_trainer_recomputes_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    remote, checkpoint, module = after_known_calls(determinism_check="outputs")
    flip_results(monkeypatch, "aten.mul", 1, on_trainer=True)
    y = checkpoint(module, inputs())
    remote.is_lost = True
    with pytest.raises(CheckpointError, match=r"1 of 1 tensors differ (.|\n)*tensor 0, returned: forward"):
        y.sum().backward()


def test_a_backward_that_is_differentiated_compares_outputs_too() -> None:
    _, checkpoint, module = after_known_calls(determinism_check="outputs")

    def second(checkpoint: Checkpoint) -> list[Tensor]:
        seed()
        x = inputs()
        (first,) = torch.autograd.grad(checkpoint(module, x).square().sum(), x, create_graph=True)
        return list(torch.autograd.grad(first.sum(), [x, module.weight]))

    assert not differing(second(checkpoint), second(plainly))


class Linears(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.2)) for _ in range(4)))


@pytest.mark.slow
@pytest.mark.parametrize("boundaries", ["send", "derive"])
@pytest.mark.parametrize("returns", ["gradients", "activations"])
def test_training_has_the_gradients_of_no_checkpointing(returns: Any, boundaries: Any, worker: WorkerProcess) -> None:
    """With activations each call is recorded, so all that autograd saves is compared."""

    def train(checkpoint: Checkpoint, accumulate: Callable[[], AbstractContextManager[Any]]) -> list[Tensor | None]:
        seed()
        layers, results = Linears(), list[Tensor | None]()
        for _ in range(3):
            layers.zero_grad()
            with accumulate():
                for _ in range(2):
                    y = torch.randn(4, WIDTH, requires_grad=True)
                    for layer in layers:
                        y = checkpoint(layer, y)
                    y.square().mean().backward()
            results += [parameter.grad for parameter in layers.parameters()]
        return [None if one is None else one.clone() for one in results]

    expected = train(plainly, nullcontext)
    settings = {**QUIET.given(), "boundaries": boundaries, "determinism_check": "outputs"}
    with backhaul.connect(worker.address, graphs="eager", returns=returns, settings=Settings(**settings)) as session:
        assert not differing(train(session.checkpoint, nullcontext), expected)
        assert not differing(train(session.checkpoint, session.accumulate), expected)
        report = session.report()
    assert report.remote
    assert not report.fallbacks
    assert bool(sum(segment.known for segment in report.segments)) is (returns == "gradients")
