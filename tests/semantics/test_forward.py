"""What a checkpointed call does and keeps in forward."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint as checkpoint_of_torch

from backhaul import DefaultDeviceType, NotRemoteError, SavedTensorModifiedError, Session
from support.bits import Checkpoint, differing, grad_of, plainly
from support.calls import (
    SAVES_BY_CUSTOM_FUNCTION,
    WIDTH,
    Counted,
    as_without_checkpointing,
    inputs,
    one,
    torch_checkpoint,
)
from support.unseen import replace_unseen


class Pair(NamedTuple):
    first: Tensor
    second: Any


@dataclass
class Batch:
    h: Tensor
    scale: float


pytree.register_dataclass(Batch)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_fn_runs_once_and_nothing_is_sent(
    mode: Any, checkpoint: Checkpoint, session: Session
) -> None:
    layer, x = Counted(), torch.randn(2, WIDTH)
    with mode():
        y = checkpoint(layer, x)
        theirs = torch_checkpoint(layer, x)
    assert layer.calls == 2
    assert torch.equal(y, theirs)
    assert not y.requires_grad
    assert session.report().segments == ()


def test_fn_is_called_once_and_returns_what_it_returned(anywhere: Checkpoint) -> None:
    calls: list[object] = []
    marker = object()

    def fn(h: Tensor) -> dict[str, Any]:
        calls.append(h)
        return {"pair": Pair(h.sin(), None), "rest": [h.cos(), (3, marker, "word")], "batch": Batch(h.exp(), 0.5)}

    x, _ = inputs()
    returned = anywhere(fn, x)
    assert len(calls) == 1
    assert calls[0] is x
    expected = fn(x)
    assert list(returned) == list(expected)
    assert type(returned["pair"]) is Pair
    assert type(returned["batch"]) is Batch
    ours, theirs = pytree.tree_leaves(returned), pytree.tree_leaves(expected)
    assert differing([t for t in ours if isinstance(t, Tensor)], [t for t in theirs if isinstance(t, Tensor)]) == []
    assert [v for v in ours if not isinstance(v, Tensor)] == [v for v in theirs if not isinstance(v, Tensor)]
    gradients = [
        torch.autograd.grad([t for t in returned if isinstance(t, Tensor)], x, [x] * 3) for returned in (ours, theirs)
    ]
    assert differing(*gradients) == []


def test_an_output_keeps_attributes_that_fn_has_set(anywhere: Checkpoint) -> None:
    def fn(h: Tensor) -> Any:
        y: Any = h.sin()
        y.tag, y.norm = "mine", h.detach().norm()
        return y, [y * 2]

    x, _ = inputs()
    y, (doubled,) = anywhere(fn, x)
    assert y.tag == "mine"
    assert torch.equal(y.norm, x.detach().norm())
    assert vars(doubled) == {}


def test_an_argument_that_is_returned_and_an_output_returned_twice_are_one_object(anywhere: Checkpoint) -> None:
    (_, h), mask = inputs(), torch.ones(3)
    returned = anywhere(lambda h, mask: (h, y := h.sin(), mask, y), h, mask)
    assert returned[0] is h
    assert returned[2] is mask
    assert returned[1] is returned[3]


@pytest.mark.parametrize("container", [{"depth": 3}, [3], {"mask": torch.ones(3)}], ids=["dict", "list", "tensors"])
def test_a_container_that_is_returned_is_the_same_object(container: Any, anywhere: Checkpoint) -> None:
    (_, h), read = inputs(), bool
    returned = anywhere(lambda h, container: (h.sin(), container), h, container)[1]
    assert read(returned is container)  # a bool: pytest would keep what it explains


@as_without_checkpointing
def test_only_parameters_need_gradients(anywhere: Checkpoint) -> list[Tensor | None]:
    linear = nn.Linear(WIDTH, WIDTH)
    anywhere(lambda x: linear(x).sin(), torch.randn(2, WIDTH)).sum().backward()
    return [linear.weight.grad, linear.bias.grad]


def test_the_reentrant_form_warns_and_gives_parameters_alone_none(checkpoint: Checkpoint) -> None:
    linear = nn.Linear(WIDTH, WIDTH)
    for call in (checkpoint_of_torch, checkpoint):
        with pytest.warns(UserWarning, match="None of the inputs have requires_grad=True. Gradients will be None"):
            y = call(lambda x: linear(x).sin(), torch.randn(2, WIDTH), use_reentrant=True)
        assert not y.requires_grad


@as_without_checkpointing
def test_nested_tensors_and_keyword_arguments_get_gradients(anywhere: Checkpoint) -> list[Tensor | None]:
    leaves = [torch.randn(2, WIDTH, requires_grad=True) for _ in range(5)]
    a, b, c, d, e = (leaf * 1 for leaf in leaves)

    def fn(box: dict[str, Any], batch: Batch, *, k: Tensor, more: list[Tensor]) -> Tensor:
        return (box["a"] * box["deep"][0] * batch.h * batch.scale * k).sin() * more[0]

    anywhere(fn, {"a": a, "deep": (b, 3)}, Batch(c, 0.5), k=d, more=[e]).sum().backward()
    return [leaf.grad for leaf in leaves]


Call = Callable[[Checkpoint, Any, Tensor, Tensor], Tensor]
WAYS_IN: dict[str, Call] = {
    "positional": lambda checkpoint, fn, h, c: checkpoint(fn, h, c),
    "keyword": lambda checkpoint, fn, h, c: checkpoint(fn, h, c=c),
    "nested": lambda checkpoint, fn, h, c: checkpoint(lambda h, d: fn(h, d["c"][0]), h, {"c": [c]}),
}
WRITES: dict[str, Callable[[Tensor], object]] = {
    "itself": lambda c: c.mul_(2),
    "through a view": lambda c: c.view(-1)[3:].zero_(),
    "through .detach()": lambda c: c.detach().mul_(2),
}
UNSEEN: dict[str, Callable[[Tensor], object]] = {
    ".data": lambda c: c.data.mul_(2),
    "NumPy or a kernel": lambda c: replace_unseen(c, 2),
}


def product(h: Tensor, c: Tensor) -> Tensor:
    return (h * c).sin() * c


@pytest.mark.parametrize("write", WRITES.values())
def test_torch_refuses_a_positional_argument_that_was_changed_in_place(write: Callable[[Tensor], object]) -> None:
    _, h = inputs()
    c = torch.randn(2, WIDTH)
    y = torch_checkpoint(product, h, c)
    write(c)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("way", WAYS_IN)
@as_without_checkpointing
def test_the_value_in_forward_is_used_of_an_argument_without_gradient(
    way: str, anywhere: Checkpoint
) -> list[Tensor | None]:
    gradients: list[Tensor | None] = []
    for write in (WRITES | UNSEEN).values():
        x, h = inputs()
        c = torch.randn(2, WIDTH)
        y = WAYS_IN[way](anywhere, product, h, c)
        if anywhere is not plainly:
            write(c)
        y.sum().backward()
        gradients.append(x.grad)
    return gradients


@pytest.mark.parametrize("is_argument", [True, False])
@as_without_checkpointing
def test_a_cache_that_later_segments_write_to(is_argument: bool, anywhere: Checkpoint) -> list[Tensor | None]:
    """A preallocated cache of keys, of which a segment reads only rows that are not written again."""
    layer, cache = nn.Linear(WIDTH, WIDTH), torch.zeros(4, WIDTH)

    def decode(x: Tensor, given: dict[str, Tensor], position: int) -> Tensor:
        rows, y = given.get("k", cache), layer(x)
        with torch.no_grad():
            rows[position] = y[0]
        return torch.tanh(y + rows[:position].sum(0))

    loss, x = torch.zeros(()), torch.ones(1, WIDTH)
    for position in range(3):
        x = anywhere(decode, x, {"k": cache} if is_argument else {}, position)
        loss = loss + x.sum()
    loss.backward()
    return [layer.weight.grad, layer.bias.grad, cache]


def test_an_argument_that_takes_gradients_changed_in_place(anywhere: Checkpoint) -> None:
    _, h = inputs()
    y = anywhere(lambda h: h.sin().sin(), h)
    h.mul_(2)
    with pytest.raises(SavedTensorModifiedError, match="modified by an inplace operation"):
        y.sum().backward()


@as_without_checkpointing
def test_an_argument_that_fn_itself_writes_to(anywhere: Checkpoint) -> list[Tensor | None]:
    x, h = inputs()
    c = torch.randn(2, WIDTH)
    anywhere(lambda h, c: (h * c.mul_(2)).sin(), h, c).sum().backward()
    return [x.grad, c]


@as_without_checkpointing
def test_ambient_hooks_keep_working_around_a_call(anywhere: Checkpoint) -> list[Tensor | None]:
    linear, (x, h) = nn.Linear(WIDTH, WIDTH), inputs()
    with torch.autograd.graph.save_on_cpu():
        y = anywhere(lambda h: linear(h).sin(), h.sin()).sin()
    y.sum().backward()
    return [x.grad, linear.weight.grad]


def test_ambient_hooks_see_nothing_of_the_segment(session: Session) -> None:
    x, h = inputs()
    seen: list[str] = []

    def pack(tensor: Tensor) -> Tensor:
        seen.append("packed")
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = session.checkpoint(lambda h: h.sin().sin(), h, returns="gradients").sin()
    assert seen == ["packed"]  # of the last sin, which is outside
    y.sum().backward()
    assert torch.equal(grad_of(x), torch.autograd.grad(x.sin().sin().sin().sum(), x)[0])


class OwnError(Exception):
    pass


def test_an_exception_of_fn_leaves_as_it_is(anywhere: Checkpoint) -> None:
    error = OwnError("why")

    def fn(h: Tensor) -> Tensor:
        h.sin()
        raise error

    x, h = inputs()
    with pytest.raises(OwnError) as caught:
        anywhere(fn, h)
    assert caught.value is error
    anywhere(torch.sin, h).sum().backward()  # and nothing stays behind that would disturb the next
    assert torch.equal(grad_of(x), x.cos())


def test_a_context_that_swallows_an_exception_is_torchs_error(checkpoint: Checkpoint) -> None:
    def fn(h: Tensor) -> Tensor:
        raise OwnError

    contexts = partial(lambda: (contextlib.suppress(OwnError), contextlib.nullcontext()))
    for call in (checkpoint,) if SAVES_BY_CUSTOM_FUNCTION else (torch_checkpoint, checkpoint):
        with pytest.raises(RuntimeError, match="context_fn suppressed an exception raised during the checkpointed"):
            call(fn, one(), context_fn=contexts)


def test_an_exception_leaves_a_context_that_lets_it_through(checkpoint: Checkpoint) -> None:
    def fn(h: Tensor) -> Tensor:
        raise OwnError

    for call in (torch_checkpoint, checkpoint):
        with pytest.raises(OwnError):
            call(fn, one(), context_fn=lambda: (contextlib.nullcontext(), contextlib.nullcontext()))


def first_use_of_the_device(x: Tensor) -> Tensor:
    torch.cuda._initialized = True
    return x.sin()


def test_a_device_first_used_inside_fn_is_torchs_error(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    for call in (torch_checkpoint, checkpoint):
        with (
            monkeypatch.context() as patch,
            pytest.raises(RuntimeError, match="device state was initialized in the forward pass"),
        ):
            patch.setattr(torch.cuda, "_initialized", False)
            patch.setattr(DefaultDeviceType, "_default_device_type", "cuda")
            call(first_use_of_the_device, one())


def test_a_device_may_be_first_used_inside_fn_if_random_state_is_not_preserved(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    for call in (torch_checkpoint, checkpoint):
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "_initialized", False)
            y = call(first_use_of_the_device, one(), preserve_rng_state=False)
        assert torch.equal(y, one().sin())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs two kinds of devices")
@as_without_checkpointing
def test_the_random_states_of_the_devices_of_all_arguments_are_taken(anywhere: Checkpoint) -> list[Tensor | None]:
    x = torch.randn(WIDTH, device="cpu", requires_grad=True)
    z = torch.randn(WIDTH, device="cuda", requires_grad=True)

    def fn(x: Tensor, box: dict[str, Tensor]) -> Tensor:
        noise = torch.rand(WIDTH, device="cuda")
        return (nn.functional.dropout(x, 0.5).sin() + (box["z"] * noise).sin().cpu()).sin()

    y = anywhere(fn, x, {"z": z})
    torch.rand(7, device="cpu")
    torch.rand(7, device="cuda")
    y.sum().backward()
    return [x.grad, z.grad]


def test_a_call_in_a_captured_graph_runs_plainly(loopback: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, requires_grad=True)
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: True)

    y = loopback.checkpoint(torch.sin, x)

    assert y.grad_fn.name() == "SinBackward0"
    assert [list(segment.kept) for segment in loopback.report().segments] == [["a CUDA graph is being captured"]]
    with pytest.raises(NotRemoteError, match="captured"):
        loopback.checkpoint(torch.sin, x, strict=True)
