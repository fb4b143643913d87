"""What torch's own tests of nested checkpoints, hooks and double backward hold, held by the default mode.

They are written anew. What they count, such as calls of the function, is left out: here it runs once.
"""

import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.checkpoint import set_checkpoint_early_stop

from backhaul import Session
from conftest import wait_until
from support.bits import Checkpoint, plainly
from support.calls import WIDTH, inputs, same

Function = Callable[[Tensor], Tensor]


def sines(x: Tensor) -> Tensor:
    return x.sin().exp().sin()


def differentiates(x: Tensor) -> Tensor:
    """Takes gradients inside that nobody uses outside."""
    for _ in range(2):
        torch.autograd.grad(x.sin().exp().sin().sum(), x)
    return x.sin()


def derivative(fn: Function) -> Function:
    def wrapped(x: Tensor) -> Tensor:
        with torch.enable_grad():
            return torch.autograd.grad(fn(x).sum(), x, create_graph=True)[0]

    return wrapped


def composed(steps: str, fn: Function, checkpoint: Checkpoint) -> Function:
    """The function, checkpointed for each "c" and differentiated for each "g", the last letter first."""
    for step in reversed(steps):
        fn = derivative(fn) if step == "g" else partial(checkpoint, fn)
    return fn


COMPOSITIONS = [
    "".join(steps)
    for length in range(1, 5)
    for steps in itertools.product("cg", repeat=length)
    if "c" in steps and steps.count("g") < 3
]


@pytest.mark.slow
@pytest.mark.parametrize("fn", [sines, differentiates])
@pytest.mark.parametrize("early_stop", [True, False])
def test_any_nesting_of_checkpoints_and_derivatives(fn: Function, early_stop: bool, session: Session) -> None:
    x = torch.randn(3, requires_grad=True)
    with set_checkpoint_early_stop(early_stop):
        for steps in COMPOSITIONS:
            expected = composed(steps, fn, plainly)(x)
            ours = composed(steps, fn, session.checkpoint)(x)
            # See test_double_backward_of_a_loss_that_is_not_linear.
            torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6, msg=steps)


def nodes_of(output: Tensor) -> Iterator[Node]:
    waiting, seen = [output.grad_fn], set[Node]()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
    yield from seen


class Attached:
    """Lives as long as a node."""


def test_no_graph_outlives_its_output(session: Session) -> None:
    """Counts of references end it, without the garbage collector. A device's autograd thread holds it a bit longer."""
    gc.collect()
    gc.disable()
    try:
        for steps in COMPOSITIONS:
            output = composed(steps, sines, session.checkpoint)(torch.randn(3, requires_grad=True))
            alive: list[weakref.ref[Attached]] = []
            for node in nodes_of(output):
                metadata: Any = node.metadata
                metadata["attached"] = attached = Attached()
                alive.append(weakref.ref(attached))
            del output, node, metadata, attached
            wait_until(lambda: all(reference() is None for reference in alive), f"the graph of {steps} dies")  # noqa: B023
    finally:
        gc.enable()


def test_two_children_and_their_derivatives(session: Session) -> None:
    def both(checkpoint: Checkpoint) -> Function:
        f = lambda x: x.sin().exp().sin()  # noqa: E731
        g = lambda x: x.cos().sin().exp()  # noqa: E731
        return lambda x: checkpoint(g, checkpoint(f, x))

    x = torch.randn(3, 3, requires_grad=True)
    for steps in ("gg", "ggc", "gcgc"):
        expected = composed(steps, both(plainly), plainly)(x)
        ours = composed(steps, both(session.checkpoint), session.checkpoint)(x)
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6, msg=steps)


@pytest.mark.parametrize("early_stop", [True, False])
def test_arguments_and_results_that_are_no_tensors(early_stop: bool, session: Session) -> None:
    def case(checkpoint: Checkpoint) -> list[Tensor | None]:
        a, b = (torch.tensor(value, requires_grad=True) for value in (2.0, 3.0))
        fn = lambda k, a, b, f, *, scale=None: (f(k * a * b.exp()) * scale, 1, "text")  # noqa: E731
        out, number, text = checkpoint(fn, 3, a, b, torch.sin, scale=b)
        assert (number, text) == (1, "text")
        return list(torch.autograd.grad(out, (a, b)))

    with set_checkpoint_early_stop(early_stop):
        same(case, session.checkpoint)


def test_a_hook_on_a_node_of_the_returned_graph_fires_once(session: Session) -> None:
    fired: list[None] = []
    out = session.checkpoint(lambda x: x.sin().cos().sin(), torch.tensor(1.0, requires_grad=True))
    out.grad_fn.next_functions[0][0].register_hook(lambda *_: fired.append(None))
    out.backward()
    assert len(fired) == 1


def test_a_backward_in_a_hook_over_what_lies_before_it(session: Session) -> None:
    def case(checkpoint: Checkpoint) -> list[Tensor | None]:
        x, _ = inputs()

        def fn(x: Tensor) -> tuple[Tensor, Tensor]:
            first = x.sin().cos()
            return first, first.sin()

        first, last = checkpoint(fn, x)
        last.grad_fn.register_hook(lambda *_: first.backward(torch.ones_like(first), retain_graph=True))
        last.sum().backward(retain_graph=True)
        return [x.grad]

    same(case, session.checkpoint)


@pytest.mark.parametrize("by", ["tensor", "node", "node before", "module", "retain_grad"])
def test_hooks_on_what_a_call_is_given_and_returns(by: str, session: Session) -> None:
    def case(checkpoint: Checkpoint) -> list[Tensor | None]:
        linear, (x, h) = nn.Linear(WIDTH, WIDTH), inputs()
        seen: list[Tensor | None] = []

        def note_first(_: nn.Module, gradients: Any) -> tuple[Tensor]:
            return (note(gradients[0]),)

        def note(gradient: Tensor) -> Tensor:
            seen.append(gradient.clone())
            return gradient * 2

        if by == "module":
            linear.register_full_backward_pre_hook(note_first)
            linear.register_full_backward_hook(lambda _, inner, outer: seen.extend(t.clone() for t in (*inner, *outer)))
        y = checkpoint(lambda h: linear(h).sin(), h)
        for tensor in (h, y):
            if by == "tensor":
                tensor.register_hook(note)
            elif by == "node":
                assert tensor.grad_fn is not None
                tensor.grad_fn.register_hook(lambda inner, outer: seen.append(outer[0].clone()))
            elif by == "node before":
                assert tensor.grad_fn is not None
                tensor.grad_fn.register_prehook(lambda outer: (note(outer[0]),))
            elif by == "retain_grad":
                tensor.retain_grad()
        y.square().sum().backward()
        retained = [h.grad, y.grad] if by == "retain_grad" else []
        return [x.grad, linear.weight.grad, linear.bias.grad, *seen, *retained]

    same(case, session.checkpoint)


def test_a_parameter_that_is_used_inside_and_outside(session: Session) -> None:
    def case(checkpoint: Checkpoint) -> list[Tensor | None]:
        w, (x, _) = torch.randn(WIDTH, requires_grad=True), inputs()
        (checkpoint(lambda x: (x * w).sin() * w, x) * w.exp()).sum().backward()
        return [x.grad, w.grad]

    same(case, session.checkpoint)


def test_an_input_that_takes_no_gradient_and_one_that_is_detached(session: Session) -> None:
    def case(checkpoint: Checkpoint) -> list[Tensor | None]:
        linear, (x, h) = nn.Linear(WIDTH, WIDTH), inputs()
        y, detached = checkpoint(lambda c, h: (linear(c).sin() * h, h.exp().detach()), torch.randn(2, WIDTH), h)
        assert not detached.requires_grad
        (y.sum() + detached.sum()).backward()
        return [x.grad, linear.weight.grad]

    same(case, session.checkpoint)


def test_an_error_in_backward_leaves_the_next_one_right(session: Session) -> None:
    def case(checkpoint: Checkpoint) -> list[Tensor | None]:
        x, h = inputs()
        y = checkpoint(lambda h: h.sin().exp(), h)
        fails = [True]

        def hook(gradient: Tensor) -> Tensor:
            if fails.pop():
                fails.append(False)
                raise ZeroDivisionError
            return gradient

        h.register_hook(hook)
        with pytest.raises(ZeroDivisionError):
            y.sum().backward(retain_graph=True)
        y.sum().backward()
        return [x.grad]

    same(case, session.checkpoint)
