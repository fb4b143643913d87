"""What a custom function has saved is the same object in backward, with all that training without checkpointing has."""

import gc
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import backhaul
from backhaul import Session
from conftest import QUIET
from support import saved_objects
from support.bits import differing
from support.processes import WorkerProcess

Checkpoint = Callable[..., Any]
ENVIRONMENT = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])}


def plainly(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


@pytest.fixture(scope="module")
def allowing() -> Any:
    with WorkerProcess("--memory", "512MiB", "--allow", "support.saved_objects", environment=ENVIRONMENT) as process:
        yield process


@pytest.fixture(params=["trainer", "worker"])
def anywhere(request: pytest.FixtureRequest, returns: str) -> Any:
    """Recomputes with a worker that does not run the functions, and with one that does."""
    worker: WorkerProcess = request.getfixturevalue("worker" if request.param == "trainer" else "allowing")
    with backhaul.connect(worker.address, settings=QUIET) as session:
        yield lambda *args: session.checkpoint(*args, returns=returns)


def answers(checkpoint: Checkpoint, question: str) -> tuple[list[Any], list[Tensor | None]]:
    """Returns what a backward answers about its saved tensors, twice over one graph, and the gradients."""
    torch.manual_seed(0)
    weight: Any = nn.Parameter(torch.randn(4, 4))
    weight.main_grad = torch.zeros(4, 4)
    view = torch.randn(8, 4)[2:6].requires_grad_()
    x = torch.randn(3, 4, requires_grad=True)
    saved_objects.ANSWERS.clear()
    saved_objects.WEIGHTS[:] = [weight]
    saved_objects.BUFFERS.clear()
    saved_objects.BUFFERS[weight] = torch.zeros(4, 4)
    function = getattr(saved_objects, question)
    y = checkpoint(lambda x: function.apply(x.sin(), weight, view).cos(), x)
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    return list(saved_objects.ANSWERS), [x.grad, weight.grad, view.grad, weight.main_grad]


@pytest.mark.parametrize("question", saved_objects.QUESTIONS)
def test_a_backward_gets_the_answers_of_plain_training(anywhere: Checkpoint, question: str) -> None:
    expected, gradients = answers(plainly, question)
    assert expected
    ours, our_gradients = answers(anywhere, question)
    assert ours == expected
    assert differing(our_gradients, gradients) == []


def test_anomaly_mode_is_seen(anywhere: Checkpoint) -> None:
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        expected, gradients = answers(plainly, "AsksForAnomalyMode")
        ours, our_gradients = answers(anywhere, "AsksForAnomalyMode")
    assert ours == expected
    assert differing(our_gradients, gradients) == []


def test_a_function_that_asks_for_nothing_still_travels(allowing: WorkerProcess) -> None:
    with backhaul.connect(allowing.address, settings=QUIET) as session:
        x = torch.randn(3, 4, requires_grad=True)
        weight = nn.Parameter(torch.randn(4, 4))
        session.checkpoint(lambda x: saved_objects.Plain.apply(x, weight), x, returns="gradients").sum().backward()
        (segment,) = session.report().segments
        assert segment.decisions == {backhaul.Decision.GRADIENTS: 1}


def test_kept_tensors_of_a_function_make_no_cycle(session: Session, returns: str) -> None:
    gc.collect()
    gc.disable()
    try:
        weight, x = nn.Parameter(torch.randn(4, 4)), torch.randn(3, 4, requires_grad=True)
        for has_backward in (True, False):
            y = session.checkpoint(lambda x: saved_objects.SavesOutput.apply(x, weight), x, returns=returns)
            alive = weakref.ref(y.grad_fn)
            if has_backward:
                y.sum().backward()
            del y
            assert alive() is None
    finally:
        gc.enable()


def test_a_saved_argument_that_is_overwritten_is_torchs_own_error(session: Session) -> None:
    weight, x = nn.Parameter(torch.randn(4, 4)), torch.randn(3, 4, requires_grad=True)

    def body(x: Tensor) -> Tensor:
        h = x.sin()
        y: Tensor = saved_objects.AsksForClass.apply(h, weight, weight)
        h.mul_(2)
        return y

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        session.checkpoint(body, x).sum().backward()


def test_a_context_that_changes_is_right_or_a_named_error(allowing: WorkerProcess) -> None:
    """Two backwards over one graph: the first one's answer shows only on a worker that the context changes."""

    def gradient(checkpoint: Checkpoint) -> Tensor | None:
        torch.manual_seed(0)
        weight, x = nn.Parameter(torch.randn(4, 4)), torch.randn(3, 4, requires_grad=True)
        y = checkpoint(lambda x: saved_objects.AppendsToItsContext.apply(x.sin(), weight).cos(), x)
        y.sum().backward(retain_graph=True)
        y.sum().backward()
        return x.grad

    with backhaul.connect(allowing.address, settings=QUIET) as session:
        with pytest.raises(backhaul.ReplayError, match="second backward over the same graph: the backward of"):
            gradient(session.checkpoint)
        assert differing([gradient(session.checkpoint)], [gradient(plainly)]) == []
