"""Custom autograd functions by name, without a wire: every form is exact, on a worker or on the trainer."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from backhaul import Decision
from backhaul._backward.value_check import CheckpointError
from backhaul_runtime.program.custom.names import JoinedNames, OfferedNames
from backhaul_runtime.program.program import Node, Program
from backhaul_runtime.torch_internals.private import backward_class
from support import functions
from support.bits import plainly, same_bits
from support.calls import TimesOne
from support.function_calls import REMOTE, TRAINERS, WIDTH, checkpointing, trained
from support.functions import Scale
from support.loopback import Loopback

ALLOWED = ["support.functions"]


def decisions(remote: Loopback) -> set[Decision]:
    return {decision for segment in remote.report().segments for decision in segment.decisions}


@pytest.mark.parametrize("form", REMOTE)
@pytest.mark.parametrize("returns", ["gradients", "activations"])
def test_a_worker_runs_functions_exactly(form: str, returns: str, remote: Loopback) -> None:
    same_bits(trained(REMOTE[form], checkpointing(remote, returns=returns)), trained(REMOTE[form], plainly))
    is_inside = returns == "activations" or form in {
        "writes to an argument of the segment",
        "has an object with an adapter",
    }
    expected = Decision.ACTIVATIONS if is_inside else Decision.GRADIENTS
    assert decisions(remote) == {expected}, remote.report()


@pytest.mark.parametrize("form", REMOTE)
@pytest.mark.parametrize("returns", ["gradients", "activations"])
def test_the_trainer_recomputes_functions_exactly(form: str, returns: str, remote: Loopback) -> None:
    """The worker is lost between forward and backward."""

    def losing(function: Any, *args: Any) -> Any:
        remote.is_lost = False
        returned = remote.checkpoint(function, *args, returns=returns)
        remote.is_lost = True
        return returned

    same_bits(trained(REMOTE[form], losing), trained(REMOTE[form], plainly))
    assert decisions(remote) == {Decision.TRAINER}


@pytest.mark.parametrize("form", TRAINERS)
@pytest.mark.parametrize("returns", ["gradients", "activations"])
def test_what_only_the_trainer_can_run_stays_there(form: str, returns: str, remote: Loopback) -> None:
    body, reason = TRAINERS[form]
    same_bits(trained(body, checkpointing(remote, returns=returns)), trained(body, plainly))
    if returns == "gradients":  # with activations, every backward runs on the trainer anyway
        (segment,) = remote.report().segments
        assert any(reason in said for said in (*segment.reasons, *segment.kept))
        assert segment.decisions[Decision.KEPT] >= 1  # from the second call on, nothing is sent


@pytest.mark.parametrize("form", [*REMOTE, *TRAINERS])
def test_what_no_worker_allows_stays_on_the_trainer(form: str) -> None:
    remote = Loopback()
    body = REMOTE[form] if form in REMOTE else TRAINERS[form][0]
    same_bits(trained(body, checkpointing(remote)), trained(body, plainly))
    assert Decision.GRADIENTS not in decisions(remote)
    (segment,) = remote.report().segments
    if form != "takes gradients in forward":  # an op inside it is the first that can't be recorded
        assert all("a worker with --allow support.functions" in reason for reason in segment.kept), segment.kept


def test_a_functions_own_second_derivative(remote: Loopback) -> None:
    def second(checkpoint: Any) -> list[Tensor]:
        torch.manual_seed(0)
        x, w = torch.randn(4, WIDTH, requires_grad=True), torch.randn(WIDTH, requires_grad=True)
        y = checkpoint(lambda h: Scale.apply(h.sin(), w, 2.0), x)
        (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return [first, *torch.autograd.grad(first.square().sum(), [x, w])]

    same_bits(second(checkpointing(remote, returns="gradients")), second(plainly))


def test_a_value_that_backward_reads_is_compared(remote: Loopback, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker here is the same process, so what it offered is from before the change."""
    monkeypatch.setattr(functions, "SLOPE", 0.125)
    body = REMOTE["reads a number of its module"]
    same_bits(trained(body, checkpointing(remote)), trained(body, plainly))
    (segment,) = remote.report().segments
    assert ["a value that it reads" in reason for reason in segment.kept] == [True]


@pytest.mark.parametrize("name", ["damping", "backward"])
def test_a_change_between_forward_and_backward_is_noticed(
    name: str, remote: Loopback, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without checkpointing, backward uses what is there when it runs."""

    def changed(checkpoint: Any) -> list[Tensor | None]:
        torch.manual_seed(0)
        x, w = torch.randn(4, WIDTH, requires_grad=True), torch.randn(WIDTH, requires_grad=True)
        y = checkpoint(lambda h: Scale.apply(h.sin(), w, 2.0), x)
        with monkeypatch.context() as patch:
            new = 7.0 if name == "damping" else staticmethod(lambda ctx, gradient: (gradient, None, None))
            patch.setattr(Scale, name, new)
            y.sum().backward()
        return [x.grad, w.grad]

    same_bits(changed(checkpointing(remote, returns="gradients")), changed(plainly))
    (segment,) = remote.report().segments
    assert ["was changed after forward" in reason for reason in segment.reasons] == [True]


def test_a_function_that_is_not_deterministic_fails_the_value_check(
    remote: Loopback, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = itertools.count(1)
    monkeypatch.setattr(functions, "COUNT", count)
    x = torch.randn(4, WIDTH, requires_grad=True)
    y = remote.checkpoint(lambda h: functions.Counting.apply(h.sin()), x)
    with pytest.raises(CheckpointError, match="Counting"):
        y.sum().backward()
    assert x.grad is None


def test_what_a_context_keeps_is_compared(remote: Loopback, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its outputs are equal both times, and a number that only its backward uses is not."""
    monkeypatch.setattr(functions, "COUNT", itertools.count(1))
    x = torch.randn(4, WIDTH, requires_grad=True)
    y = remote.checkpoint(lambda h: functions.Remembering.apply(h.sin()), x)
    with pytest.raises(CheckpointError, match="Remembering"):
        y.sum().backward()


def test_a_hook_inside_the_segment_sees_gradients(remote: Loopback) -> None:
    def hooked(checkpoint: Any) -> list[Tensor | None]:
        torch.manual_seed(0)
        seen: list[Tensor] = []
        x, w = torch.randn(4, WIDTH, requires_grad=True), torch.randn(WIDTH, requires_grad=True)

        def body(h: Tensor) -> Tensor:
            y = Scale.apply(h.sin(), w, 2.0)
            y.register_hook(seen.append)
            y.grad_fn.register_hook(lambda inputs, _: seen.append(inputs[0]))
            return y * 2

        checkpoint(body, x).sum().backward()
        return [x.grad, w.grad, *seen]

    same_bits(hooked(checkpointing(remote)), hooked(plainly))


def test_an_exception_inside_a_function_reaches_the_caller(remote: Loopback) -> None:
    def failing(h: Tensor, w: Tensor) -> Tensor:
        try:
            functions.Failing.apply(h.sin())
        except KeyError:
            h = h * 2
        return Scale.apply(h, w, 2.0)

    same_bits(trained(failing, checkpointing(remote, returns="gradients")), trained(failing, plainly))
    assert decisions(remote) == {Decision.GRADIENTS}


def test_an_exception_in_backward_keeps_its_type(remote: Loopback) -> None:
    y = remote.checkpoint(lambda h: functions.FailingBackward.apply(h.sin()), torch.ones(3, requires_grad=True))
    with pytest.raises(KeyError, match="in backward"):
        y.sum().backward()


def test_a_function_that_writes_to_a_tensor_of_its_own_module(remote: Loopback) -> None:
    def counted(checkpoint: Any) -> list[Tensor | None]:
        functions.TOTAL.zero_()
        return [*trained(lambda h, w: functions.Accumulating.apply(h * w), checkpoint), functions.TOTAL.clone()]

    same_bits(counted(checkpointing(remote)), counted(plainly))
    (segment,) = remote.report().segments
    assert "not among its arguments" in next(iter(segment.kept))


def test_a_backward_inside_the_call(remote: Loopback) -> None:
    """It needs what the function has saved, while the call still runs."""

    def inner(h: Tensor, w: Tensor) -> Tensor:
        y = Scale.apply(h.sin(), w, 2.0)
        (gradient,) = torch.autograd.grad(y.sum(), h, retain_graph=True)
        return Scale.apply(y + gradient, w, 3.0)

    same_bits(trained(inner, checkpointing(remote)), trained(inner, plainly))


def test_a_refused_function_beside_an_allowed_one(remote: Loopback) -> None:
    """What the allowed one saved before is recomputed, and what the other one saves is kept."""

    def both(h: Tensor, w: Tensor) -> Tensor:
        return TimesOne.apply(Scale.apply(h.sin(), w, 2.0)).sin() * w

    same_bits(trained(both, checkpointing(remote)), trained(both, plainly))
    assert decisions(remote) == {Decision.KEPT, Decision.TRAINER}


def test_other_hardware_gets_no_functions() -> None:
    """What a function draws or decides can't be recorded, so a worker with other bits must not run it."""
    remote = Loopback(records_choices=True, allow=ALLOWED)
    body = REMOTE["saves a tensor and a number"]
    same_bits(trained(body, checkpointing(remote)), trained(body, plainly))
    (segment,) = remote.report().segments
    assert ["other hardware" in reason for reason in segment.reasons] == [True]


def test_a_tensor_that_a_context_and_someone_else_keep(remote: Loopback) -> None:
    """The graph of the inside must stay, because an auxiliary loss leads through it."""

    def kept(checkpoint: Any) -> list[Tensor | None]:
        torch.manual_seed(0)
        x, w = torch.randn(4, WIDTH, requires_grad=True), torch.randn(WIDTH, requires_grad=True)
        inside: list[Tensor] = []

        def body(h: Tensor) -> Tensor:
            inside.append(h.sin())
            return functions.Hidden.apply(inside[0], w.outer(w)).exp()

        y = checkpoint(body, x)
        (y.sum() + inside[0].square().sum()).backward()
        return [x.grad, w.grad]

    same_bits(kept(checkpointing(remote)), kept(plainly))
    assert decisions(remote) == {Decision.ACTIVATIONS}


def test_a_setting_that_backward_reads_is_compared(remote: Loopback, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an object, which a training loop may change after the worker has started."""
    monkeypatch.setattr(functions.SETTINGS, "slope", 0.125)
    body = lambda h, w: functions.ReadsSettings.apply(h * w).sin()  # noqa: E731
    same_bits(trained(body, checkpointing(remote)), trained(body, plainly))
    (segment,) = remote.report().segments
    assert ["a value that it reads" in reason for reason in segment.kept] == [True]


def test_a_function_that_draws_from_a_forked_generator(remote: Loopback) -> None:
    """The generator's state shows nothing of it afterwards."""
    body = lambda h, w: functions.DroppedInFork.apply(h * w, 0.5).sin()  # noqa: E731
    same_bits(trained(body, checkpointing(remote, returns="gradients")), trained(body, plainly))
    assert decisions(remote) == {Decision.GRADIENTS}


def test_the_backward_of_an_op_is_compared(remote: Loopback, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between forward and backward, as on a worker whose installation of the library is another."""
    x = torch.randn(4, WIDTH, requires_grad=True)
    y = remote.checkpoint(lambda h: functions.shifted(h.sin(), 0.5), x, returns="gradients")
    monkeypatch.setattr(functions, "OFFSET", 3.0)
    with pytest.raises(CheckpointError, match="shifted"):
        y.sum().backward()


@pytest.mark.parametrize("shape", [(WIDTH, WIDTH), (WIDTH,), (4, WIDTH)])
def test_damaged_arguments_are_noticed(shape: tuple[int, ...], remote: Loopback) -> None:
    """A quantised weight, the scales in its state, or the input of the segment."""
    weight = torch.arange(WIDTH * WIDTH, dtype=torch.uint8).view(WIDTH, WIDTH)
    state, pair = functions.State(torch.full((WIDTH,), 0.5), 4), functions.Pair(torch.full((1,), 0.25), 2.0)

    def body(h: Tensor, w: Tensor) -> Tensor:
        return functions.Dequantized.apply(h, weight, state, pair, (2.0,))

    def damaging(function: Any, *args: Any) -> Tensor:
        y = remote.checkpoint(function, *args, returns="gradients")
        for tensor in remote.given.values():
            if tuple(tensor.shape) == shape:
                tensor.flatten()[3] += 1
        return y

    same_bits(trained(body, damaging, steps=1), trained(body, plainly, steps=1))
    assert decisions(remote) == {Decision.TRAINER}
    assert len(remote.changed()) == 1
    remote.given.clear()


def test_functions_of_two_sessions_with_other_lists() -> None:
    """A segment that the chosen worker does not allow runs on the trainer, whatever another worker allows."""
    offer = Loopback(allow=ALLOWED).offers[0]
    both = JoinedNames([OfferedNames(), offer])
    assert both.why_not_function(Scale) == ""
    program = Program((), (Node("support.functions:Scale", (), (), 0, (), False),), (), (), 0, 0)
    identities = {"support.functions:Scale": offer.functions["support.functions:Scale"]}
    assert offer.why_not_program(program, identities) == ""
    assert offer.missing(program) == ""
    assert OfferedNames().missing(program) == "support.functions:Scale"
    assert "--allow support.functions:Scale" in OfferedNames().why_not_program(program, identities)
    older = OfferedNames({"support.functions": "0.9"}, offer.functions)
    assert "has version - (files " in older.why_not_function(Scale)
    assert ") here and 0.9 on the worker" in older.why_not_function(Scale)


@pytest.mark.parametrize("returns", ["gradients", "activations"])
def test_a_segment_returns_several_outputs_of_functions(returns: str, remote: Loopback) -> None:
    def several(checkpoint: Any) -> list[Tensor | None]:
        torch.manual_seed(0)
        x, w = torch.randn(4, WIDTH, requires_grad=True), torch.randn(WIDTH, requires_grad=True)

        def body(h: Tensor) -> Any:
            first, second = functions.Unmaterialized.apply(h * w)
            powers, places = functions.WithSetup.apply(first)
            return {"powers": powers, "places": [places, second]}

        y = checkpoint(body, x)
        (y["powers"].sum() * 2).backward(retain_graph=True)
        y["places"][1].square().sum().backward()
        return [x.grad, w.grad, y["places"][0]]

    same_bits(several(checkpointing(remote, returns=returns)), several(plainly))


def test_what_is_defined_in_a_function_can_not_be_named() -> None:
    class Local(torch.autograd.Function):
        pass

    assert "not defined at the top of a module" in OfferedNames().why_not_function(Local)


def test_backwards_are_noticed_of_functions_that_workers_run_only(remote: Loopback) -> None:
    """Those of all others run as torch runs them."""
    body = lambda h, w: TimesOne.apply(Scale.apply(h.sin() * w, w, 2.0))  # noqa: E731
    same_bits(trained(body, checkpointing(remote)), trained(body, plainly))
    assert "apply" in vars(backward_class(Scale))
    assert "apply" not in vars(backward_class(TimesOne))
    assert BackwardCFunction.apply.__module__ == "torch.autograd.function"
