"""When a segment is recomputed, how often, and what backward may do with it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError, GraphExecGroup, set_checkpoint_early_stop
from torch.utils.checkpoint import checkpoint as checkpoint_of_torch

from backhaul import Decision, Session, WorkerLostError
from backhaul._backward.frame import Frame
from backhaul._backward.handles import Handle
from support.bits import Checkpoint, differing, grad_of
from support.calls import (
    WIDTH,
    Counted,
    as_without_checkpointing,
    inputs,
    memory_of,
    recomputations,
    recorded_ops,
    same,
    sines,
    torch_checkpoint,
)
from support.loopback import Loopback


def slope(x: Tensor) -> Tensor:
    return torch.autograd.grad(sines(x).sum(), x)[0]


def test_a_backward_is_one_recomputation(checkpoint: Checkpoint, session: Session) -> None:
    x, _ = inputs()
    h = x
    for _ in range(3):
        h = checkpoint(sines, h)
    assert recomputations(session) == 0
    h.sum().backward()
    assert recomputations(session) == 3
    assert torch.equal(grad_of(x), torch.autograd.grad(sines(sines(sines(x))).sum(), x)[0])


def test_where_nothing_is_saved_nothing_is_recomputed_or_fetched(checkpoint: Checkpoint, session: Session) -> None:
    x, _ = inputs()
    checkpoint(lambda x: (x + 1).neg(), x).sum().backward()
    assert torch.equal(grad_of(x), -torch.ones_like(x))
    assert recomputations(session) == 0
    assert session.report().down_bytes == 0


def test_a_second_backward_recomputes_again(checkpoint: Checkpoint, session: Session) -> None:
    x, _ = inputs()
    y = checkpoint(sines, x)
    y.sum().backward(retain_graph=True)
    assert torch.equal(grad_of(x), slope(x))
    assert recomputations(session) == 1
    y.sum().backward()
    assert torch.equal(grad_of(x), slope(x) + slope(x))
    assert recomputations(session) == 2


def test_without_retain_graph_it_is_torchs_error(anywhere: Checkpoint) -> None:
    for call in (torch_checkpoint, anywhere):
        y = call(sines, inputs()[0])
        y.sum().backward()
        with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
            y.sum().backward()


def two(x: Tensor) -> tuple[Tensor, Tensor]:
    return sines(x), x.cos().exp()


def test_two_outputs_and_two_backwards_are_two_recomputations(checkpoint: Checkpoint, session: Session) -> None:
    x, _ = inputs()
    first, second = checkpoint(two, x)
    first.sum().backward(retain_graph=True)
    assert torch.equal(grad_of(x), slope(x))
    second.sum().backward()
    assert recomputations(session) == 2
    assert torch.equal(grad_of(x), slope(x) + torch.autograd.grad(x.cos().exp().sum(), x)[0])


def test_two_backwards_in_one_group_are_one_recomputation(
    checkpoint: Checkpoint, session: Session, returns: str
) -> None:
    for call in (torch_checkpoint, checkpoint):
        calls = 0

        def fn(x: Tensor) -> tuple[Tensor, Tensor]:
            nonlocal calls
            calls += 1
            return two(x)

        x, _ = inputs()
        first, second = call(fn, x)
        with GraphExecGroup():
            first.sum().backward(retain_graph=True)
            second.sum().backward()
        assert calls == (2 if call is torch_checkpoint else 1)
        assert torch.equal(grad_of(x), slope(x) + torch.autograd.grad(x.cos().exp().sum(), x)[0])
    assert recomputations(session) == (1 if returns == "activations" else 2)


def test_two_backwards_in_two_groups_are_two_recomputations(session: Session) -> None:
    x, _ = inputs()
    y = session.checkpoint(sines, x, returns="activations")
    for _ in range(2):
        with GraphExecGroup():
            y.sum().backward(retain_graph=True)
    assert torch.equal(grad_of(x), slope(x) + slope(x))
    assert recomputations(session) == 2


def test_nested_groups_are_torchs_error(checkpoint: Checkpoint) -> None:
    y = checkpoint(sines, inputs()[0])
    with GraphExecGroup():
        with pytest.raises(RuntimeError, match="GraphExecGroup contexts cannot be nested"), GraphExecGroup():
            pass
        y.sum().backward()


def test_overlapping_backwards_in_a_group_are_torchs_error(session: Session) -> None:
    said = []
    for call in (torch_checkpoint, session.checkpoint):
        options = {} if call is torch_checkpoint else {"returns": "activations"}
        y = call(sines, inputs()[0], **options)
        with GraphExecGroup():
            y.sum().backward(retain_graph=True)
            with pytest.raises(CheckpointError, match="already unpacked once") as caught:
                y.sum().backward()
        said.append(str(caught.value))
    assert "Performing two backward calls that overlap" in said[0]
    assert "Performing two backward calls that overlap" in said[1]


@as_without_checkpointing
def test_grad_inputs_partial_graphs_and_unused_outputs(anywhere: Checkpoint) -> list[Tensor | None]:
    linear, (x, h), y = nn.Linear(WIDTH, WIDTH), inputs(), torch.randn(2, WIDTH, requires_grad=True)
    first, second, _unused = anywhere(lambda h, y: (linear(h).sin(), (h * y).sin(), h.exp().exp()), h, y)
    gradients: list[Tensor | None] = []
    gradients += torch.autograd.grad(first.sum(), [x, linear.weight], retain_graph=True)
    gradients += torch.autograd.grad(second.sum(), [h, y], retain_graph=True)
    second.sum().backward(retain_graph=True, inputs=[y])
    gradients += [x.grad, y.grad, linear.weight.grad]
    (first.sum() + second.mean()).backward()
    return [*(t.clone() if t is not None else None for t in gradients), x.grad, y.grad, linear.weight.grad]


def test_backward_from_another_thread(anywhere: Checkpoint) -> None:
    x, _ = inputs()
    thread = threading.Thread(target=anywhere(sines, x).sum().backward)
    thread.start()
    thread.join()
    assert torch.equal(grad_of(x), slope(x))


REENTRANT = "When use_reentrant=True, torch.utils.checkpoint is incompatible with .grad\\(\\)"


def test_the_reentrant_form_refuses_grad_and_inputs(anywhere: Checkpoint) -> None:
    for call in (checkpoint_of_torch, anywhere):
        x, _ = inputs()
        y = call(sines, x, use_reentrant=True)
        with pytest.raises(RuntimeError, match=REENTRANT):
            torch.autograd.grad(y.sum(), x, retain_graph=True)
        with pytest.raises(RuntimeError, match=REENTRANT):
            y.sum().backward(inputs=[x], retain_graph=True)
        y.sum().backward()
        assert torch.equal(grad_of(x), slope(x))


@pytest.mark.parametrize("retain_graph", [False, True])
def test_recomputed_tensors_are_freed_as_they_are_unpacked(
    retain_graph: bool, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    unpacked: list[Any] = []
    alive: list[int] = []
    unpack = Frame.unpack

    def note(frame: Frame, index: Handle) -> Tensor:
        alive.append(sum(not memory.expired() for memory in unpacked))
        tensor = unpack(frame, index)
        unpacked.append(memory_of(tensor))
        return tensor

    monkeypatch.setattr(Frame, "unpack", note)

    def deep(x: Tensor) -> Tensor:
        for _ in range(8):
            x = x.sin()
        return x

    x = torch.randn(2000, requires_grad=True)
    deep_slope = torch.autograd.grad(deep(x).sum(), x)[0]
    y = session.checkpoint(deep, x, returns="activations")
    for _ in range(1 + retain_graph):
        unpacked.clear()
        y.sum().backward(retain_graph=retain_graph)
        assert all(memory.expired() for memory in unpacked[:-1])  # the last is the argument's copy
        assert len(unpacked) == 8
    assert max(alive) <= 1
    assert torch.equal(grad_of(x), deep_slope + deep_slope if retain_graph else deep_slope)


SINE = "aten.sin.default"


@pytest.mark.parametrize(
    ("option", "globally", "whole"),
    [
        (True, None, False),
        (False, None, True),
        (True, False, True),
        (False, True, False),
    ],
)
def test_early_stop_ends_with_the_last_save(
    option: bool, globally: bool | None, whole: bool, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = recorded_ops(session, monkeypatch)

    def forward(x: Tensor) -> Tensor:
        return session.checkpoint(
            lambda x: (x.sin().sin() + 1).neg(), x, early_stop=option, returns="activations", strict=True
        )

    x, _ = inputs()
    if globally is None:
        y = forward(x)
    else:
        with set_checkpoint_early_stop(globally):
            y = forward(x)
    y.sum().backward()
    assert torch.equal(grad_of(x), torch.autograd.grad((x.sin().sin() + 1).neg().sum(), x)[0])
    assert programs == [[SINE, SINE, "aten.add.Tensor", "aten.neg.default"] if whole else [SINE, SINE]]


def test_early_stop_is_read_at_forward_time(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = recorded_ops(session, monkeypatch)
    x, _ = inputs()
    y = session.checkpoint(lambda x: x.sin().sin().neg(), x, returns="activations")
    with set_checkpoint_early_stop(False):
        y.sum().backward()
    assert programs == [[SINE, SINE]]


def test_gradients_need_the_whole_forward(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = recorded_ops(session, monkeypatch)
    x, _ = inputs()
    session.checkpoint(lambda x: x.sin().neg(), x, returns="gradients").sum().backward()
    assert programs == [[SINE, "aten.neg.default"]]


def test_nested_calls_belong_to_the_outermost(anywhere: Checkpoint, session: Session) -> None:
    def case(checkpoint: Checkpoint) -> list[Tensor | None]:
        layers, (x, h) = [nn.Linear(WIDTH, WIDTH) for _ in range(3)], inputs()

        def deepest(h: Tensor) -> Tensor:
            return layers[0](h).sin()

        def middle(h: Tensor) -> Tensor:
            return layers[1](checkpoint(deepest, h.exp()) * h).sin()

        def outer(h: Tensor) -> Tensor:
            return layers[2](checkpoint(middle, h.tanh()) + checkpoint(deepest, h)).sin()

        checkpoint(outer, h).sum().backward()
        return [x.grad, *(layer.weight.grad for layer in layers)]

    same(case, anywhere)
    (segment,) = session.report().segments
    assert segment.calls == 1


@as_without_checkpointing
def test_grad_inside_fn(anywhere: Checkpoint) -> list[Tensor | None]:
    linear, (x, h) = nn.Linear(WIDTH, WIDTH), inputs()

    def fn(h: Tensor) -> Tensor:
        y = linear(h).tanh()
        (slope,) = torch.autograd.grad(y.square().sum(), h, create_graph=True)
        return (y * slope).sin()

    anywhere(fn, h).sum().backward()
    return [x.grad, linear.weight.grad]


def test_grad_inside_fn_of_the_reentrant_form(anywhere: Checkpoint) -> None:
    def fn(x: Tensor) -> Tensor:
        y = x.sin().exp()
        (gradient,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        return y * gradient.detach()

    x = torch.randn(4, requires_grad=True)
    anywhere(fn, x, use_reentrant=True).sum().backward()
    assert torch.equal(grad_of(x), torch.autograd.grad(fn(x).sum(), x)[0])


def test_hooks_of_parameters_fire_once_per_backward(anywhere: Checkpoint) -> None:
    layer, (x, _) = Counted(), inputs()
    fired: list[Tensor] = []
    layer.linear.weight.register_post_accumulate_grad_hook(lambda p: fired.append(p.grad.clone()))
    anywhere(lambda x: layer(layer(x)), x).sum().backward()
    layer(layer(x)).sum().backward()
    assert len(fired) == 2
    assert torch.equal(fired[1], fired[0] + fired[0])


def test_forward_hooks_fire_once(anywhere: Checkpoint) -> None:
    assert hooks_fired(anywhere) == ["hook"]
    assert hooks_fired(torch_checkpoint) == ["hook", "hook"]


def hooks_fired(checkpoint: Checkpoint) -> list[str]:
    fired: list[str] = []
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    module[0].register_forward_hook(lambda *_: fired.append("hook"))
    checkpoint(module, inputs()[0]).sum().backward()
    return fired


def test_exceptions_of_recomputation_reach_the_caller(session: Session) -> None:
    class OwnError(Exception):
        pass

    @contextmanager
    def fails() -> Iterator[None]:
        raise error
        yield

    for call in (torch_checkpoint, session.checkpoint):
        error = OwnError("on recomputation")
        y = call(sines, inputs()[0], context_fn=lambda: (nullcontext(), fails()))
        with pytest.raises(OwnError) as caught:
            y.sum().backward()
        assert caught.value is error


@as_without_checkpointing
def test_gradients_have_the_dtypes_of_the_arguments_and_none_stays_none(anywhere: Checkpoint) -> list[Tensor | None]:
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float32]
    leaves = [torch.randn(2, WIDTH, dtype=dtype, requires_grad=True) for dtype in dtypes]
    a, b, c, unused = (leaf * 1 for leaf in leaves)
    anywhere(lambda a, b, c, unused: (a.sin() * b + c).sin(), a, b, c, unused).sum().backward()
    assert leaves[3].grad is None
    assert [grad_of(leaf).dtype for leaf in leaves[:3]] == dtypes[:3]
    return [leaf.grad for leaf in leaves]


@as_without_checkpointing
def test_arguments_that_are_one_or_share_memory_stay_so(anywhere: Checkpoint) -> list[Tensor | None]:
    x, h = inputs()
    c = torch.randn(2, WIDTH)
    seen: list[bool] = []

    def fn(h: Tensor, again: Tensor, row: Tensor, c: Tensor, part: Tensor) -> Tensor:
        seen.append(h is again and c.data_ptr() == part.data_ptr())
        part.mul_(3)  # and so c
        return (h * again + row).sin() * c

    y = anywhere(fn, h, h, h[0], c, c[0])
    y.sum().backward()
    assert all(seen)
    return [x.grad, c]


@as_without_checkpointing
def test_gradients_of_views_of_one_leaf_are_added_as_without_checkpointing(anywhere: Checkpoint) -> list[Tensor | None]:
    x = torch.randn(4, WIDTH, requires_grad=True)
    anywhere(lambda a, b, whole: ((a * b).sin() * whole[1:3]).exp(), x[:2], x[2:], x).sum().backward()
    return [x.grad]


def test_who_recomputed_is_who_was_asked(checkpoint: Checkpoint, session: Session, returns: str) -> None:
    x, _ = inputs()
    checkpoint(sines, x).sum().backward()
    assert session.report().segments[0].decisions == {Decision(returns): 1}
    assert differing([x.grad], [slope(x)]) == []


def test_a_worker_that_another_thread_has_lost_meanwhile_costs_a_recomputation(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Frame.remote_gradients

    def lost_meanwhile(frame: Frame, *arguments: Any) -> Any:
        frame.lost(WorkerLostError("gone", status="LOST"))
        return asked(frame, *arguments)

    monkeypatch.setattr(Frame, "remote_gradients", lost_meanwhile)
    remote, x = Loopback(), torch.randn(3, requires_grad=True)
    remote.checkpoint(torch.sin, x).sum().backward()
    assert torch.equal(grad_of(x), x.detach().cos())
    (segment,) = remote.report().segments
    assert segment.decisions == {Decision.TRAINER: 1}
