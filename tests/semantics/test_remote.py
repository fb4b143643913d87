"""What remote recomputation adds: no interior on the trainer, state by value, and nothing left behind."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from backhaul import CheckpointError, Decision, Session
from backhaul._backward.value_check import Recomputed
from backhaul_runtime.program.program import Program
from conftest import settle, wait_until
from support.bits import Checkpoint, grad_of
from support.calls import WIDTH, TimesOne, as_without_checkpointing, inputs, memory_of, nodes_behind, same
from support.processes import WorkerProcess
from support.unseen import replace_unseen


def test_no_interior_is_left_on_the_trainer(session: Session) -> None:
    interior: list[StorageWeakRef] = []

    def fn(x: Tensor) -> Tensor:
        y = x.sin()
        interior.append(memory_of(y))
        return y.exp().tanh()

    x, _ = inputs()
    y = session.checkpoint(fn, x, returns="gradients")
    assert interior[0].expired()
    assert "SinBackward0" in nodes_behind(fn(x))
    assert not nodes_behind(y) & {"SinBackward0", "ExpBackward0", "TanhBackward0"}
    y.sum().backward()
    assert torch.equal(grad_of(x), torch.autograd.grad(fn(x).sum(), x)[0])


def test_activations_leave_nodes_but_no_tensors(session: Session) -> None:
    interior: list[StorageWeakRef] = []

    def fn(x: Tensor) -> Tensor:
        y = x.sin()
        interior.append(memory_of(y))
        return y.exp().tanh()

    y = session.checkpoint(fn, inputs()[0], returns="activations")
    assert interior[0].expired()
    assert {"SinBackward0", "ExpBackward0", "TanhBackward0"} <= nodes_behind(y)


def hooked_tensor(h: Tensor) -> Tensor:
    y = h.sin()
    y.register_hook(lambda gradient: gradient * 2)
    return y.exp()


def hooked_node(h: Tensor) -> Tensor:
    y = h.sin()
    assert y.grad_fn is not None
    y.grad_fn.register_hook(lambda gradients, _: (gradients[0] * 2,))
    return y.exp()


def prehooked_node(h: Tensor) -> Tensor:
    y = h.sin()
    assert y.grad_fn is not None
    y.grad_fn.register_prehook(lambda gradients: (gradients[0] * 2,))
    return y.exp()


def custom(h: Tensor) -> Tensor:
    return TimesOne.apply(h.sin()).exp()


INTERIORS = [hooked_tensor, hooked_node, prehooked_node, custom]


@pytest.mark.parametrize("fn", INTERIORS)
def test_what_needs_the_interior_gets_it(fn: Callable[[Tensor], Tensor], session: Session) -> None:
    def case(checkpoint: Checkpoint) -> list[Tensor | None]:
        x, h = inputs()
        checkpoint(fn, h).sum().backward()
        return [x.grad]

    for asked in ("gradients", "auto", "activations"):
        same(case, partial(session.checkpoint, returns=asked))
    assert Decision.GRADIENTS not in session.report().segments[0].decisions


@as_without_checkpointing
def test_an_interior_tensor_that_outlives_the_call(anywhere: Checkpoint) -> list[Tensor | None]:
    (x, h), kept = inputs(), []

    def fn(h: Tensor) -> Tensor:
        kept.append(h.sin())
        return kept[0].exp()

    y = anywhere(fn, h)
    kept[0].register_hook(lambda gradient: gradient * 2)
    y.sum().backward()
    return [x.grad]


@as_without_checkpointing
def test_captured_tensors_are_differentiated(anywhere: Checkpoint) -> list[Tensor | None]:
    parameter = nn.Parameter(torch.randn(WIDTH))
    leaf = torch.randn(WIDTH, requires_grad=True)
    start = torch.randn(WIDTH, requires_grad=True)
    (x, h), inner = inputs(), start * 2
    held = {"inner": inner}
    anywhere(lambda h: (h * parameter + leaf).sin() * held["inner"], h).sum().backward()
    return [x.grad, parameter.grad, leaf.grad, start.grad]


@as_without_checkpointing
def test_only_captured_tensors_need_gradients(anywhere: Checkpoint) -> list[Tensor | None]:
    leaf = torch.randn(WIDTH, requires_grad=True)
    anywhere(lambda: leaf.sin().exp()).sum().backward()
    return [leaf.grad]


CHECKS = ["none", "values"]


@pytest.mark.parametrize("check", CHECKS)
def test_values_are_verified_before_a_gradient_is_delivered(check: str, session: Session) -> None:
    x, _ = inputs()
    hidden: list[Tensor] = []
    x.register_hook(hidden.append)

    def fn(x: Tensor) -> Tensor:
        y = x * 2
        replace_unseen(y, 0, 5)  # what no program tells
        return y.sin()

    y = session.checkpoint(fn, x, determinism_check=check)
    with pytest.raises(CheckpointError):
        y.sum().backward()
    assert x.grad is None
    assert hidden == []


class Altered:
    """A worker's segment whose answers say that a saved tensor differs."""

    def __init__(self, segment: Any) -> None:
        self._segment = segment

    def backward(self, *given: Any, **options: Any) -> Any:
        answer = self._segment.backward(*given, **options)
        return answer._replace(compared=Recomputed([bytes(16), *answer.compared.digests[1:]]))

    def recompute(self, positions: Any) -> Any:
        incoming = self._segment.recompute(positions)
        incoming.compared = Recomputed([bytes(16), *incoming.compared.digests[1:]])
        return incoming


@pytest.mark.parametrize("check", CHECKS)
def test_a_worker_with_other_values_is_not_believed(
    check: str, session: Session, returns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = session._dispatcher.save

    def altered(*given: Any) -> tuple[Altered, Program]:
        saved, program = save(*given)
        return Altered(saved), program

    monkeypatch.setattr(session._dispatcher, "save", altered)
    x, _ = inputs()
    y = session.checkpoint(lambda x: x.sin().exp().sin(), x, returns=returns, determinism_check=check)
    y.sum().backward()
    assert torch.equal(grad_of(x), torch.autograd.grad(x.sin().exp().sin().sum(), x)[0])
    assert (session.report().remote, session.report().fallbacks) == (0, 1)
    assert any("differ" in reason for reason in session.report().segments[0].reasons)


def remaining(worker: WorkerProcess) -> int:
    return sum(session.segments for session in worker.telemetry().sessions)


def forward_alone(checkpoint: Checkpoint) -> None:
    y = checkpoint(torch.sin, inputs()[0])
    assert y.requires_grad


def an_exception_between(checkpoint: Checkpoint) -> None:
    def step() -> None:
        checkpoint(lambda x: x.sin().exp(), inputs()[0])
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        step()


def an_exception_inside(checkpoint: Checkpoint) -> None:
    with pytest.raises(ZeroDivisionError):
        checkpoint(lambda x: x.sin() / (1 / 0), inputs()[0])


def a_dropped_output(checkpoint: Checkpoint) -> None:
    x, _ = inputs()
    first, second = checkpoint(lambda x: (x.sin().exp(), x.cos().exp()), x)
    del second
    first.sum().backward()


def a_graph_that_was_retained(checkpoint: Checkpoint) -> None:
    y = checkpoint(lambda x: x.sin().exp(), inputs()[0])
    y.sum().backward(retain_graph=True)


@pytest.mark.parametrize(
    "use", [forward_alone, an_exception_between, an_exception_inside, a_dropped_output, a_graph_that_was_retained]
)
def test_what_the_worker_has_is_released_at_once(
    use: Callable[[Checkpoint], None], checkpoint: Checkpoint, session: Session, worker: WorkerProcess
) -> None:
    use(checkpoint)
    settle(session)
    wait_until(lambda: remaining(worker) == 0, "segments are released")
    assert worker.telemetry().memory.segment_bytes == 0


def test_what_the_worker_has_is_not_released_before_the_output_is_dropped(
    checkpoint: Checkpoint, session: Session, worker: WorkerProcess
) -> None:
    y = checkpoint(lambda x: x.sin().exp(), inputs()[0])
    settle(session)
    assert remaining(worker) >= 1
    del y
    settle(session)
    wait_until(lambda: remaining(worker) == 0, "segments are released")
