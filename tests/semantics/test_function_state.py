"""Custom autograd functions whose backward depends on objects, settings and memory of others, without a wire."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from backhaul import Decision, ReplayError, SettingError
from backhaul._backward.value_check import CheckpointError
from backhaul_runtime.program.custom import adapters
from backhaul_runtime.program.program import Composite, Node, Program, ResultRef, Source, SourceRef
from backhaul_runtime.replay.replay import Replay
from backhaul_runtime.torch_internals import ambient_state
from support import function_objects, function_settings, function_state, function_values
from support.bits import grad_of, plainly, same_bits
from support.function_calls import WIDTH, checkpointing, trained
from support.loopback import Loopback

ALLOWED = ["support.function_state", "support.function_values", "support.function_objects"]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (("Scales", tuple, tuple), "the name 'Scales': write the class as"),
        (("two words:Scales", tuple, tuple), "write the class as"),
        ((function_objects.Slotted, tuple, tuple), "write the class as"),
        (("some:Class", None, tuple), "needs functions, not None"),
        (("some:Class", tuple, "build"), "needs functions"),
    ],
)
def test_wrong_arguments_of_register_adapter_are_named(given: Any, why: str) -> None:
    with pytest.raises(SettingError, match=why):
        adapters.register_adapter(*given)


@pytest.mark.parametrize("kind", function_state.MAKERS)
def test_objects_that_a_context_keeps_are_compared(kind: str, remote: Loopback) -> None:
    """Each run gets another number, which only backward uses."""
    x = torch.randn(4, WIDTH, requires_grad=True)
    y = remote.checkpoint(lambda h: function_state.Keeping.apply(h.sin(), kind), x, returns="gradients")
    with pytest.raises(CheckpointError, match="Keeping"):
        y.sum().backward()
    assert x.grad is None


@pytest.mark.parametrize("kind", [*function_state.CONSTANT, *function_state.INCOMPARABLE])
def test_a_context_may_keep_what_is_equal_in_each_run(kind: str, remote: Loopback) -> None:
    x = torch.randn(4, WIDTH, requires_grad=True)
    y = remote.checkpoint(lambda h: function_state.Holding.apply(h.sin(), kind), x, returns="gradients")
    y.sum().backward()
    assert torch.equal(grad_of(x), 2 * x.cos())
    (segment,) = remote.report().segments
    assert [kind in reason for reason in segment.kept] == [True] * (kind in function_state.INCOMPARABLE)
    assert segment.fallbacks == 0


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (function_state.NoisyInFork, "draws random numbers"),
        (function_state.Noting, "not its own"),
        (function_values.ByCache, "not compared with the trainer's"),
    ],
)
def test_what_a_backward_does_to_others_stays_on_the_trainer(function: Any, reason: str, remote: Loopback) -> None:
    def noted(checkpoint: Any) -> list[Tensor | None]:
        function_state.TOTAL.zero_()
        results = trained(lambda h, w: function.apply(h.sin() * w).cos(), checkpoint)
        return [*results, function_state.TOTAL.clone()]

    same_bits(noted(checkpointing(remote, returns="gradients")), noted(plainly))
    (segment,) = remote.report().segments
    assert Decision.GRADIENTS not in segment.decisions
    assert any(reason in said for said in segment.reasons)


@pytest.mark.parametrize("name", ["ByTensor", "ByTuple", "ByTensorOfClass", "ByConstants", "ByComparing"])
def test_a_backward_may_use_what_its_forward_made_and_what_is_compared(name: str, remote: Loopback) -> None:
    function = getattr(function_values, name)
    body = lambda h, w: function.apply(h.sin() * w).cos()  # noqa: E731
    same_bits(trained(body, checkpointing(remote, returns="gradients")), trained(body, plainly))
    (segment,) = remote.report().segments
    assert segment.decisions == {Decision.GRADIENTS: 2}


@pytest.mark.parametrize(
    ("name", "holder", "attribute", "value"),
    [
        ("ByTable", function_values, "SLOPE", 0.125),
        ("ByObject", function_values, "SLOPE", 0.125),
        ("ByPartial", function_values, "SLOPE", 0.125),
        ("ByImport", function_settings, "THRESHOLD", 0.125),
        ("ByArray", function_values, "ARRAY", function_values.ARRAY / 2),
        ("ByNested", function_settings.SETTINGS.inner, "slope", 0.125),
    ],
)
def test_what_a_backward_reads_in_other_ways_is_compared(
    name: str, holder: Any, attribute: str, value: Any, remote: Loopback, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker here is the same process, so what it offered is from before the change."""
    monkeypatch.setattr(holder, attribute, value)
    function = getattr(function_values, name)
    body = lambda h, w: function.apply(h.sin() * w).cos()  # noqa: E731
    same_bits(trained(body, checkpointing(remote)), trained(body, plainly))
    (segment,) = remote.report().segments
    assert ["a value that it reads" in reason for reason in segment.kept] == [True]


@pytest.mark.parametrize(
    ("value", "travels"),
    [
        (function_objects.Slotted(2.0), True),
        (function_objects.Both(1.0, 2.0), False),  # it may change before backward
        (function_objects.Converting(2.0), True),
        (function_objects.Flags.FIRST, True),
        (function_objects.Flags.FIRST | function_objects.Flags.SECOND, False),
        (function_objects.Items(number=2.0), False),
        (2**63 - 1, True),
        (2**63, False),
        ("\ud800", False),
    ],
    ids=repr,
)
def test_any_object_is_an_argument(value: Any, travels: bool, remote: Loopback) -> None:
    """Objects that no program can hold keep the segment on the trainer; they raise no error."""
    body = lambda h, w: function_objects.Taking.apply(h.sin() * w, value).cos()  # noqa: E731
    same_bits(trained(body, checkpointing(remote, returns="gradients")), trained(body, plainly))
    (segment,) = remote.report().segments
    assert (Decision.GRADIENTS in segment.decisions) is travels, segment


@pytest.mark.parametrize("returns", ["gradients", "activations"])
def test_an_argument_that_changes_before_backward_is_read_as_it_is_then(returns: str, remote: Loopback) -> None:
    def case(checkpoint: Any) -> list[Tensor | None]:
        options = {"factor": 2.0}
        x, w = torch.arange(4.0).requires_grad_(), torch.ones(4, requires_grad=True)
        y = checkpoint(lambda h: function_objects.Powers.apply(h * w, options).cos(), x)
        options["factor"] = 5.0
        y.sum().backward()
        return [y, x.grad, w.grad]

    same_bits(case(checkpointing(remote, returns=returns)), case(plainly))
    (segment,) = remote.report().segments
    assert set(segment.decisions) == {Decision.ACTIVATIONS}


def test_functions_that_share_a_name_stay_on_the_trainer(remote: Loopback) -> None:
    def body(h: Tensor, w: Tensor) -> Tensor:
        halved: Tensor = function_values.HALVING.apply(h.sin() * w)
        tripled: Tensor = function_values.TRIPLING.apply(halved.cos())
        return tripled.sin()

    same_bits(trained(body, checkpointing(remote, returns="gradients")), trained(body, plainly))
    (segment,) = remote.report().segments
    assert ["not defined at the top of a module" in reason for reason in segment.kept] == [True]


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("Python", "outside of torch"), ("NumPy", "outside of torch"), ("torch", "a generator of its own")],
)
def test_draws_that_no_replay_can_repeat_stay_on_the_trainer(kind: str, reason: str, remote: Loopback) -> None:
    def seeded(checkpoint: Any) -> list[Tensor | None]:
        random.seed(0)
        np.random.seed(0)
        function_state.GENERATOR.manual_seed(0)
        return trained(lambda h, w: function_state.Outside.apply(h.sin() * w, kind).cos(), checkpoint)

    same_bits(seeded(checkpointing(remote)), seeded(plainly))
    (segment,) = remote.report().segments
    assert [reason in said for said in segment.kept] == [True]


@pytest.mark.parametrize("returns", ["gradients", "activations"])
def test_a_tensor_on_the_default_device_keeps_a_function_on_the_trainer(returns: str, remote: Loopback) -> None:
    """A replay has no default device: a worker has other devices, and autograd's threads know none."""

    def case(checkpoint: Any) -> list[Tensor | None]:
        x = torch.arange(4.0).requires_grad_()
        with torch.device("meta"):
            y = checkpoint(lambda h: function_state.OnDefaultDevice.apply(h.sin()).cos(), x)
        y.sum().backward()
        return [y, x.grad]

    same_bits(case(checkpointing(remote, returns=returns)), case(plainly))
    (segment,) = remote.report().segments
    assert ["makes a tensor on the default device" in reason for reason in segment.kept] == [True]


def test_a_function_that_fails_after_a_write(remote: Loopback) -> None:
    def caught(h: Tensor, w: Tensor) -> Tensor:
        h = h * w
        with pytest.raises(KeyError):
            function_state.FailsLate.apply(h)
        return h.sin() * w

    same_bits(trained(caught, checkpointing(remote)), trained(caught, plainly))
    (segment,) = remote.report().segments
    assert ["fails after a write" in said for said in segment.kept] == [True]


@pytest.mark.parametrize(
    ("name", "attribute", "reason"),
    [
        ("SetsGrad", "grad", "uses .grad"),
        ("AddsToMain", "main_grad", "the attribute main_grad"),
        ("ReadsAttribute", "factor", "the attribute factor"),
    ],
)
def test_attributes_of_tensors_stay_on_the_trainer(name: str, attribute: str, reason: str, remote: Loopback) -> None:
    function = getattr(function_state, name)

    def attributed(checkpoint: Any) -> list[Tensor | None]:
        torch.manual_seed(0)
        x, w = torch.randn(4, WIDTH, requires_grad=True), torch.randn(WIDTH, requires_grad=True)
        if attribute != "grad":
            setattr(w, attribute, torch.ones(WIDTH))
        checkpoint(lambda h: function.apply(h.sin(), w).cos(), x).sum().backward()
        return [x.grad, getattr(w, attribute)]

    same_bits(attributed(checkpointing(remote)), attributed(plainly))
    (segment,) = remote.report().segments
    assert [reason in said for said in segment.kept] == [True]


def test_a_function_that_sets_a_gradient_elsewhere_stays_on_the_trainer(remote: Loopback) -> None:
    def case(checkpoint: Any) -> list[Tensor | None]:
        torch.manual_seed(0)
        x, w = torch.randn(4, WIDTH, requires_grad=True), torch.randn(WIDTH, requires_grad=True)
        checkpoint(lambda h: function_state.AddsElsewhere.apply(h.sin(), w), x).sum().backward()
        return [x.grad, w.grad]

    same_bits(case(checkpointing(remote, returns="gradients")), case(plainly))


def test_a_backward_that_writes_to_its_context_is_noticed(remote: Loopback) -> None:
    body = lambda h, w: function_state.WritingOwn.apply(h.sin() * w).cos()  # noqa: E731
    same_bits(trained(body, checkpointing(remote, returns="gradients")), trained(body, plainly))
    (segment,) = remote.report().segments
    assert any("changes its context" in reason for reason in segment.reasons)


@pytest.mark.parametrize("returns", ["gradients", "activations"])
def test_a_backward_that_reads_between_the_rows_of_a_saved_tensor_stays_on_the_trainer(
    returns: str, remote: Loopback
) -> None:
    """Only the elements of a saved tensor are compared and sent, not the gaps between its rows."""
    body = lambda h, w: function_state.BetweenRows.apply(h.sin() * w).cos()  # noqa: E731
    same_bits(trained(body, checkpointing(remote, returns=returns)), trained(body, plainly))
    (segment,) = remote.report().segments
    assert ["may read as_strided of what it saved" in reason for reason in segment.kept] == [True]


@pytest.mark.parametrize("kind", sorted(function_state.CHANGED.keys() - {function_state.UNNOTICED}))
def test_any_change_of_a_context_is_noticed(kind: str, remote: Loopback) -> None:
    """The first run raises, as a worker has run the first backward. The function then stays on the trainer."""

    def twice(checkpoint: Any) -> list[Tensor | None]:
        x = torch.arange(4.0).requires_grad_()
        y = checkpoint(lambda h: function_state.ChangingContext.apply(h.sin(), kind).cos(), x).sum()
        return [torch.autograd.grad(y, x, retain_graph=True)[0] for _ in range(2)]

    with pytest.raises(
        ReplayError, match="second backward over the same graph: the backward of .* changes its context"
    ):
        twice(checkpointing(remote, returns="gradients"))
    same_bits(twice(checkpointing(remote, returns="gradients")), twice(plainly))


def test_memory_behind_a_view_on_a_context_is_as_in_forward(remote: Loopback) -> None:
    def twice(checkpoint: Any) -> list[Tensor | None]:
        x = torch.arange(4.0).requires_grad_()
        body = lambda h: function_state.ChangingContext.apply(h.sin(), function_state.UNNOTICED).cos()  # noqa: E731
        y = checkpoint(body, x).sum()
        return [torch.autograd.grad(y, x, retain_graph=True)[0] for _ in range(2)]

    ours, plain = twice(checkpointing(remote, returns="gradients")), twice(plainly)
    same_bits(ours, [plain[0], plain[0]])


def test_one_object_for_two_arguments(remote: Loopback) -> None:
    """A replay builds two objects from the parts of one."""
    slotted = function_objects.Slotted(2.0)
    body = lambda h, w: function_objects.TakingTwo.apply(h.sin() * w, slotted, slotted).cos()  # noqa: E731
    same_bits(trained(body, checkpointing(remote, returns="gradients")), trained(body, plainly))
    (segment,) = remote.report().segments
    assert segment.decisions == {Decision.GRADIENTS: 2}


def test_a_context_may_hold_something_that_holds_itself(remote: Loopback) -> None:
    body = lambda h, w: function_state.KeepingItself.apply(h.sin() * w).cos()  # noqa: E731
    same_bits(trained(body, checkpointing(remote, returns="gradients")), trained(body, plainly))
    (segment,) = remote.report().segments
    assert segment.decisions == {Decision.GRADIENTS: 2}


@pytest.mark.parametrize("name", ["KeepingTwice", "KeepingWeakly"])
def test_what_someone_else_holds_beside_a_context_keeps_its_graph(name: str, remote: Loopback) -> None:
    """However often the context refers to it."""
    function = getattr(function_state, name)

    def held(checkpoint: Any) -> list[Tensor | None]:
        torch.manual_seed(0)
        x, w = torch.randn(4, WIDTH, requires_grad=True), torch.randn(WIDTH, requires_grad=True)
        inside: list[Tensor] = []

        def body(h: Tensor) -> Tensor:
            inside.append(h * w)
            return function.apply(inside[0]).cos() * w

        y = checkpoint(body, x)
        return list(torch.autograd.grad(y.sum(), [inside[0], x, w]))

    same_bits(held(checkpointing(remote)), held(plainly))
    (segment,) = remote.report().segments
    assert segment.decisions == {Decision.ACTIVATIONS: 1}


def test_a_list_in_a_named_tuple_may_change_before_backward(remote: Loopback) -> None:
    def case(checkpoint: Any) -> list[Tensor | None]:
        listed = function_objects.Listed([2.0])
        x = torch.arange(4.0).requires_grad_()
        y = checkpoint(lambda h: function_objects.TakingListed.apply(h.sin(), listed).cos(), x)
        listed.numbers[0] = 5.0
        y.sum().backward()
        return [y, x.grad]

    same_bits(case(checkpointing(remote)), case(plainly))
    (segment,) = remote.report().segments
    assert set(segment.decisions) == {Decision.ACTIVATIONS}


def test_an_adapter_may_be_registered_while_another_thread_looks_one_up(monkeypatch: pytest.MonkeyPatch) -> None:
    look_up = adapters._look_up

    def meanwhile(cls: type) -> Any:
        adapter = look_up(cls)
        adapters.register_adapter("some:Class", flatten=lambda _: (), build=lambda cls, _: cls())
        return adapter

    class Unknown:
        pass

    monkeypatch.setattr(adapters, "_registered", {**adapters._registered})
    monkeypatch.setattr(adapters, "_look_up", meanwhile)
    assert adapters.adapter_of(Unknown) is None


def test_an_attribute_of_a_tensor_may_change_before_backward(remote: Loopback) -> None:
    def case(checkpoint: Any) -> list[Tensor | None]:
        marked = torch.ones(4).as_subclass(function_objects.Marked)
        marked.scale = 2.0
        x = torch.arange(4.0).requires_grad_()
        y = checkpoint(lambda h: function_objects.TakingMarked.apply(h.sin(), marked).cos(), x)
        marked.scale = 5.0
        y.sum().backward()
        return [y, x.grad]

    same_bits(case(checkpointing(remote)), case(plainly))
    (segment,) = remote.report().segments
    assert set(segment.decisions) == {Decision.ACTIVATIONS}


def test_the_class_of_an_argument_is_compared(remote: Loopback, monkeypatch: pytest.MonkeyPatch) -> None:
    """Changed after forward here, as the worker without a wire has the same class."""
    x = torch.randn(4, WIDTH, requires_grad=True)
    sloped = function_objects.Sloped(4)
    y = remote.checkpoint(lambda h: function_objects.TakingSloped.apply(h.sin(), sloped), x, returns="gradients")
    monkeypatch.setattr(function_objects.Sloped, "slope", 5.0)
    with pytest.raises(CheckpointError, match="TakingSloped"):
        y.sum().backward()


@pytest.mark.parametrize("returns", ["gradients", "activations"])
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("ByTensor", lambda: function_values.SLOPES.data.mul_(5)),
        ("ByTensorOfClass", lambda: function_values.ByTensorOfClass.slopes.data.mul_(5)),
        ("ByTuple", lambda: function_values.PAIR[0].data.mul_(5)),
        ("ByArray", lambda: function_values.ARRAY.__imul__(5)),
        ("ByBase", lambda: setattr(function_values.Constants, "slope", 5 * function_values.Constants.slope)),
    ],
)
def test_what_a_backward_reads_may_change_after_forward(
    name: str, change: Callable[[], object], returns: str, remote: Loopback
) -> None:
    """No version counter shows it. Without checkpointing, backward uses what is there when it runs."""
    function = getattr(function_values, name)

    def changed(checkpoint: Any) -> list[Tensor | None]:
        x = torch.arange(4.0).requires_grad_()
        y = checkpoint(lambda h: function.apply(h.sin()).cos(), x)
        change()
        y.sum().backward()
        return [y, x.grad]

    ours = changed(checkpointing(remote, returns=returns))
    if returns == "gradients":
        (segment,) = remote.report().segments
        assert ["was changed after forward" in reason for reason in segment.reasons] == [True]
    plain = changed(plainly)
    assert plain[1] is not None
    same_bits(ours, [plain[0], plain[1] / 5])


@pytest.mark.parametrize("returns", ["gradients", "activations"])
def test_a_function_that_counts_its_calls_stays_on_the_trainer(returns: str, remote: Loopback) -> None:
    """A replay would count again."""

    def counted(checkpoint: Any) -> list[Tensor | None]:
        function_values.CountingForward.calls = 0
        body = lambda h, w: function_values.CountingForward.apply(h.sin() * w).cos()  # noqa: E731
        return [*trained(body, checkpoint), torch.tensor(function_values.CountingForward.calls)]

    same_bits(counted(checkpointing(remote, returns=returns)), counted(plainly))
    (segment,) = remote.report().segments
    first, second = segment.kept
    assert "was changed by the call" in first
    assert "is another on the worker" in second
    function_values.CountingForward.calls = 0


def test_what_can_not_be_compared_keeps_a_function_on_the_trainer(remote: Loopback) -> None:
    body = lambda h, w: function_values.BySparse.apply(h.sin() * w).cos()  # noqa: E731
    same_bits(trained(body, checkpointing(remote)), trained(body, plainly))
    (segment,) = remote.report().segments
    assert ["a tensor or array that can't be compared" in reason for reason in segment.kept] == [True]


def test_a_context_may_hold_only_so_many_values(remote: Loopback) -> None:
    """The trainer runs such a call, and a worker that is sent one answers with an error of its own."""
    listed = function_objects.Listed([0.5] * 20_001)
    body = lambda h, w: function_objects.TakingListed.apply(h.sin() * w, listed).cos()  # noqa: E731
    same_bits(trained(body, checkpointing(remote)), trained(body, plainly))
    (segment,) = remote.report().segments
    assert ["more than 20000 values" in reason for reason in segment.kept] == [True]
    arguments = (SourceRef(0), Composite("support.function_objects:Listed", ((0.5,) * 20_001,)))
    node = Node("support.function_objects:TakingListed", arguments, (), 0, (16,), draws=False)
    program = Program((Source(True, False, False),), (node,), (ambient_state.capture(),), (ResultRef(0, 0),), 1, 0)
    with pytest.raises(ReplayError, match="more than 20000 values"):
        Replay(program, [torch.ones(4)], [])
