"""Names, arguments and what is refused, as in torch.utils.checkpoint."""

import inspect
from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as checkpoint_of_torch
from torch.utils.checkpoint import checkpoint_sequential as sequential_of_torch

import backhaul
from backhaul import Decision, NotRemoteError, Session
from backhaul_runtime.wire.tensor_receiver import _StreamedTensor
from support.bits import Checkpoint, differing, grad_of, plainly
from support.calls import WIDTH, Counted, TimesOne, as_without_checkpointing, inputs, one, same

TORCHS_OWN = [
    "CheckpointPolicy",
    "DefaultDeviceType",
    "GraphExecGroup",
    "SelectiveCheckpointContext",
    "create_selective_checkpoint_contexts",
    "noop_context_fn",
    "set_checkpoint_debug_enabled",
    "set_checkpoint_early_stop",
]
CHECKS = ["default", "none", "values", "bytes", "outputs"]


@pytest.mark.parametrize("name", TORCHS_OWN)
def test_torchs_own_names_are_here_too(name: str) -> None:
    assert name in backhaul.__all__
    assert getattr(backhaul, name) is getattr(torch.utils.checkpoint, name)


def test_names_that_we_have_in_place_of_torchs() -> None:
    assert {"checkpoint", "checkpoint_sequential", "CheckpointError"} <= set(backhaul.__all__)
    assert issubclass(backhaul.CheckpointError, torch.utils.checkpoint.CheckpointError)


def test_checkpoint_takes_each_keyword_of_torchs_and_its_own(session: Session, returns: str) -> None:
    x = inputs()[0]
    signature = inspect.signature(checkpoint_of_torch).parameters.values()
    options = {p.name: p.default for p in signature if p.kind is p.KEYWORD_ONLY} | {"preserve_rng_state": True}
    y = backhaul.checkpoint(lambda x: x.sin().sin(), x, **options, returns=returns, strict=True, session=session)
    y.sum().backward()
    assert torch.equal(grad_of(x), torch.autograd.grad(x.sin().sin().sum(), x)[0])
    assert session.report().segments[0].decisions == {Decision(returns): 1}


def test_strict_raises_where_the_trainer_would_recompute(session: Session) -> None:
    with pytest.raises(NotRemoteError, match="custom autograd function") as caught:
        session.checkpoint(TimesOne.apply, inputs()[1], strict=True)
    assert "TimesOne" in caught.value.reason


def test_checkpoint_as_a_decorator_of_a_function(session: Session, returns: str) -> None:
    @session.checkpoint(use_reentrant=False, returns=returns)
    def fn(h: Tensor, *, scale: float) -> Tensor:
        """Scales."""
        return (h.sin() * scale).sin()

    x, h = inputs()
    fn(h, scale=3.0).sum().backward()
    assert torch.equal(grad_of(x), torch.autograd.grad((x.sin() * 3.0).sin().sum(), x)[0])
    assert (fn.__name__, fn.__doc__) == ("fn", "Scales.")
    assert session.report().segments[0].decisions == {Decision(returns): 1}


def test_checkpoint_as_a_decorator_of_a_method(session: Session, returns: str) -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        @backhaul.checkpoint(use_reentrant=False, returns=returns)
        def forward(self, h: Tensor) -> Tensor:
            """Runs the layer."""
            return self.linear(h).sin()

        @backhaul.checkpoint(use_reentrant=False)
        def twice(self, h: Tensor) -> Tensor:
            return (self.linear(h) * 2).sin()

    first, second, (x, _) = Layer(), Layer(), inputs()
    wanted = [x, *first.parameters(), *second.parameters()]
    ours = torch.autograd.grad(second.twice(first(x)).sum(), wanted)
    expected = torch.autograd.grad((second.linear(first.linear(x).sin()) * 2).sin().sum(), wanted)
    assert differing(ours, expected) == []
    assert (Layer.forward.__name__, Layer.forward.__doc__) == ("forward", "Runs the layer.")
    assert session.report().remote == 2


def test_the_decorator_uses_the_session_of_the_call(session: Session) -> None:
    decorate = backhaul.checkpoint(use_reentrant=False, session=session)
    x, h = inputs()
    decorate(torch.sin)(h).sum().backward()
    assert torch.equal(grad_of(x), x.cos())
    assert session.report().segments[0].calls == 1


@pytest.mark.parametrize(("options", "hooked"), [({}, True), ({"respect": True}, True), ({"respect": False}, False)])
def test_respect_saved_tensors_hooks(options: dict[str, bool], hooked: bool, checkpoint: Checkpoint) -> None:
    policy = partial(torch.utils.checkpoint.create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    given = {"respect_saved_tensors_hooks": options["respect"]} if options else {}
    w = torch.randn(WIDTH, WIDTH)
    packed: list[Tensor] = []
    x = torch.randn(2, WIDTH, requires_grad=True)
    product = x.detach() @ w

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor.detach())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = checkpoint(lambda x: (x @ w).sin(), x, context_fn=policy, **given)
    y.sum().backward()
    assert torch.equal(grad_of(x), torch.autograd.grad((x @ w).sin().sum(), x)[0])
    assert any(torch.equal(t, product) for t in packed if t.shape == product.shape) is hooked


def test_respect_saved_tensors_hooks_is_not_for_the_reentrant_form(checkpoint: Checkpoint) -> None:
    for respect in (True, False):
        with pytest.raises(ValueError, match="respect_saved_tensors_hooks"):
            checkpoint(torch.sin, one(), use_reentrant=True, respect_saved_tensors_hooks=respect)


def test_use_reentrant_omitted_is_false_without_a_warning(checkpoint: Checkpoint) -> None:
    x, h = inputs()
    y = checkpoint(lambda h, *, w: h * w, h, w=h)  # a keyword argument: the reentrant form refuses
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], x + x)
    with pytest.warns(UserWarning, match="the use_reentrant parameter should be passed explicitly"):
        checkpoint_of_torch(torch.sin, h)


@as_without_checkpointing
def test_use_reentrant_true_gives_gradients_to_nested_tensors_too(checkpoint: Checkpoint) -> list[Tensor | None]:
    linear, (x, h), y = nn.Linear(WIDTH, WIDTH), inputs(), torch.randn(WIDTH, requires_grad=True)
    options = {} if checkpoint is plainly else {"use_reentrant": True}
    checkpoint(lambda h, d: linear(h) * d["y"], h, {"y": y}, **options).sum().backward()
    return [x.grad, y.grad, linear.weight.grad]


def test_keyword_arguments_are_refused_by_the_reentrant_form(checkpoint: Checkpoint) -> None:
    for call in (checkpoint_of_torch, checkpoint):
        with pytest.raises(ValueError, match="^Unexpected keyword arguments: k$"):
            call(torch.sin, one(), use_reentrant=True, k=3)


@pytest.mark.parametrize("options", [{"debug": True}, {"context_fn": lambda: None}])
def test_context_fn_and_debug_are_refused_by_the_reentrant_form(
    options: dict[str, Any], checkpoint: Checkpoint
) -> None:
    refused = refusals(options | {"use_reentrant": True}, checkpoint)
    assert all("only supported when use_reentrant=False" in message for message in refused)
    # Later versions of torch name this third option in the same sentence.
    if "respect_saved_tensors_hooks" not in inspect.signature(checkpoint_of_torch).parameters:
        assert refused[0] == refused[1]


def test_an_unknown_determinism_check_is_refused_with_the_known_ones(checkpoint: Checkpoint) -> None:
    theirs, ours = refusals({"determinism_check": "all"}, checkpoint, use_reentrant=False)
    assert "should be one of" in theirs
    assert ours == f"determinism_check should be one of {CHECKS}, but got all"


@pytest.mark.parametrize("returns", ["gradients", "activations"])
def test_bytes_sees_what_happens_to_a_tensor_after_it_has_arrived(
    returns: str, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a bug in putting it together would be. The trainer recomputes then."""
    finish = _StreamedTensor.finish
    monkeypatch.setattr(_StreamedTensor, "finish", lambda arrival: finish(arrival).mul_(1.001))
    x, h = inputs()
    session.checkpoint(lambda h: h.sin().exp(), h, returns=returns, determinism_check="bytes").sum().backward()
    (expected,) = torch.autograd.grad(x.sin().exp().sum(), x)
    assert torch.equal(grad_of(x), expected)
    (reason,) = session.report().segments[0].reasons
    assert "damaged" in reason


@pytest.mark.parametrize("check", CHECKS)
def test_each_determinism_check_gives_the_same_gradients(check: str, checkpoint: Checkpoint, session: Session) -> None:
    def case(checkpoint: Checkpoint) -> list[Tensor | None]:
        lstm, rrelu, (x, h) = nn.LSTM(WIDTH, WIDTH), nn.RReLU(), inputs()  # both save memory of undefined contents
        options = {} if checkpoint is plainly else {"determinism_check": check}
        checkpoint(lambda h: rrelu(lstm(h)[0]).sin(), h, **options).sum().backward()
        return [x.grad, *(p.grad for p in lstm.parameters())]

    same(case, checkpoint)
    assert session.report().remote == 1


def test_debug_with_a_context_of_the_callers_own_is_refused(checkpoint: Checkpoint) -> None:
    refused = refusals({"debug": True, "context_fn": lambda: None}, checkpoint, use_reentrant=False)
    assert "incompatible with non-default context_fn" in refused[0]
    assert refused[0] == refused[1]


def refusals(options: dict[str, Any], checkpoint: Checkpoint, **more: Any) -> list[str]:
    """What torch and we say to these options."""
    said = []
    for call in (checkpoint_of_torch, checkpoint):
        with pytest.raises(ValueError) as caught:
            call(torch.sin, one(), **options, **more)
        said.append(str(caught.value))
    return said


@pytest.mark.parametrize("form", [list, lambda layers: nn.Sequential(*layers)])
def test_the_last_chunk_of_a_sequence_is_not_checkpointed(form: Any, session: Session, returns: str) -> None:
    layers = [Counted() for _ in range(5)]
    counts = []
    for run in (partial(session.checkpoint_sequential, returns=returns), sequential_of_torch):
        x, _ = inputs()
        run(form(layers), 2, x, use_reentrant=False).sum().backward()
        counts.append([layer.calls for layer in layers])
        for layer in layers:
            layer.calls = 0
    assert counts == [[1, 1, 1, 1, 1], [2, 2, 1, 1, 1]]
    (segment,) = session.report().segments
    assert (segment.calls, segment.decisions) == (1, {Decision(returns): 1})


def test_chunks_of_a_sequence_run_on_the_worker(session: Session, returns: str) -> None:
    layers, (x, _) = nn.Sequential(*(Counted() for _ in range(6))), inputs()
    wanted = [x, *layers.parameters()]
    ours = torch.autograd.grad(session.checkpoint_sequential(layers, 3, x, returns=returns).sum(), wanted)
    assert [layer.calls for layer in layers] == [1] * 6
    assert session.report().remote == 2
    assert differing(ours, torch.autograd.grad(layers(x).sum(), wanted)) == []


def test_more_segments_than_functions_are_a_clear_error(session: Session) -> None:
    for segments in (0, 3):
        with pytest.raises(ValueError, match=f"{segments=} must be between 1 and the number of functions, 2"):
            session.checkpoint_sequential([torch.sin] * 2, segments, one())
    with pytest.raises(ValueError, match="must not be zero"):
        sequential_of_torch([torch.sin] * 2, 3, one(), use_reentrant=False)


def test_a_sequence_takes_no_keyword_arguments_but_options(session: Session) -> None:
    ours = partial(session.checkpoint_sequential, returns="gradients", debug=False)
    for run in (ours, sequential_of_torch, partial(backhaul.checkpoint_sequential, session=session)):
        with pytest.raises(ValueError, match="^Unexpected keyword arguments: foo,bar$"):
            run([torch.sin] * 2, 2, one(), use_reentrant=False, foo=1, bar=2)


def total(outputs: Iterable[Tensor]) -> Any:
    return sum(output.sum() for output in outputs)


def test_several_inputs_go_to_each_function_of_a_sequence(session: Session, returns: str) -> None:
    functions = [lambda a, b: (a * b, a + b), lambda a, b: (a.sin(), b.cos()), lambda a, b: (b * a, a)] * 2
    x, y = inputs()[0], inputs()[0]
    expected = x, y
    for function in functions:
        expected = function(*expected)
    ours = session.checkpoint_sequential(functions, 3, x, y, returns=returns)
    assert differing(ours, expected) == []
    gradients = [torch.autograd.grad(total(outputs), [x, y]) for outputs in (ours, expected)]
    assert differing(*gradients) == []
    assert (session.report().segments[0].calls, session.report().fallbacks) == (2, 0)


def test_one_input_of_a_sequence_that_is_a_tuple_stays_one(session: Session, returns: str) -> None:
    def fn(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        first, second = pair
        return first * second, second.sin()

    x, y = inputs()[0], inputs()[0]
    for run in (partial(session.checkpoint_sequential, returns=returns), sequential_of_torch):
        ours = run([fn] * 4, 2, (x, y), use_reentrant=False)
        expected = fn(fn(fn(fn((x, y)))))
        gradients = [torch.autograd.grad(total(outputs), [x, y]) for outputs in (ours, expected)]
        assert differing(*gradients) == []


def test_checkpoint_sequential_as_a_function_of_the_module(session: Session) -> None:
    x, h = inputs()
    backhaul.checkpoint_sequential([torch.sin] * 2, 2, h, session=session, preserve_rng_state=False).sum().backward()
    assert torch.equal(grad_of(x), torch.autograd.grad(x.sin().sin().sum(), x)[0])
    assert session.report().remote == 1
