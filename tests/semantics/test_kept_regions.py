"""Regions of a call whose saved tensors stay on the trainer, while workers recompute the rest."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from backhaul import CheckpointError, Decision, Session
from backhaul._torch_api.kept_regions import kept_region
from support.bits import differing
from support.calls import TimesOne, one
from support.devices import DEVICE
from support.unseen import replace_unseen

WIDTH = 32
Region = Callable[[], AbstractContextManager[Any]]
Body = Callable[[Region, Tensor, Tensor], Tensor]


def products(region: Region, x: Tensor, w: Tensor) -> Tensor:
    with region():
        y = (x @ w).exp()
    return (y.sin() @ w).tanh()


def in_place(region: Region, x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    with region():
        y.relu_()
        y = (y * w).sigmoid_()
    return (y * 2).cos().sin_() @ w


def written_after_the_region(region: Region, x: Tensor, w: Tensor) -> Tensor:
    with region():
        y = x.sin()
        z = y + 1
    y.zero_()
    return (y + z).tanh() @ w


def views(region: Region, x: Tensor, w: Tensor) -> Tensor:
    with region():
        y = (x @ w).view(2, -1).t().exp()
        first, second = y.chunk(2)
    return (first.reshape(-1) * second.reshape(-1).cos()).sin()


def random(region: Region, x: Tensor, w: Tensor) -> Tensor:
    with region():
        y = functional.dropout(x @ w, 0.5)
    return functional.dropout(y.tanh(), 0.5).exp()


def inputs_and_nested(region: Region, x: Tensor, w: Tensor) -> Tensor:
    with region():
        with region():
            y = x.exp() * w
        y = y * x
    return (y.sin() * x).cos()


def whole(region: Region, x: Tensor, w: Tensor) -> Tensor:
    with region():
        return (x @ w).exp().sin()


def batch_norm(region: Region, x: Tensor, w: Tensor) -> Tensor:
    with region():
        y = functional.batch_norm(x @ w, x.detach().mean(0), x.detach().var(0), training=True)
    return y.tanh() @ w


def attention(region: Region, x: Tensor, w: Tensor) -> Tensor:
    query = x.view(1, 2, -1, 8)
    with region():
        y = functional.scaled_dot_product_attention(query, query * w.mean(), query, is_causal=True)
    return functional.layer_norm(y, (8,)).exp()


def under_autocast(region: Region, x: Tensor, w: Tensor) -> Tensor:
    with torch.autocast(DEVICE, torch.bfloat16):
        y = x @ w
        with region():
            z = (y @ w).softmax(-1)
        return (z @ w).float().tanh()


BODIES = [
    products,
    in_place,
    written_after_the_region,
    views,
    random,
    inputs_and_nested,
    batch_norm,
    attention,
    under_autocast,
]


def operands() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(WIDTH, WIDTH, requires_grad=True), torch.randn(WIDTH, WIDTH, requires_grad=True)


def outcome(call: Callable[..., Tensor], body: Body, region: Region) -> list[Tensor]:
    """The output, the gradients, and the random state after forward and backward."""
    x, w = operands()
    y = call(lambda x: body(region, x * 1, w), x)
    after = torch.get_rng_state()
    return [y.detach(), *torch.autograd.grad(y.float().square().sum(), [x, w]), after, torch.get_rng_state()]


def plain(function: Callable[..., Tensor], *args: Any) -> Tensor:
    return function(*args)


@pytest.mark.parametrize("returns", ["auto", "gradients", "activations"])
@pytest.mark.parametrize("body", BODIES)
def test_gradients_are_those_without_checkpointing(body: Body, returns: str, session: Session) -> None:
    def call(function: Any, *args: Any) -> Any:
        return session.checkpoint(function, *args, returns=returns)

    assert differing(outcome(call, body, kept_region), outcome(plain, body, nullcontext)) == []
    (segment,) = session.report().segments
    assert segment.decisions == {Decision.ACTIVATIONS: 1}
    assert segment.reasons == segment.kept == {}


@pytest.mark.parametrize("body", BODIES)
def test_the_trainer_recomputes_the_rest_if_the_worker_is_gone(body: Body, session: Session) -> None:
    def call(function: Any, *args: Any) -> Any:
        y = session.checkpoint(function, *args)
        session.close()
        return y

    assert differing(outcome(call, body, kept_region), outcome(plain, body, nullcontext)) == []
    assert session.report().segments[0].decisions == {Decision.TRAINER: 1}


def test_only_what_is_outside_of_the_region_comes_back(session: Session) -> None:
    def down_bytes(region: Region) -> int:
        before = session.report().down_bytes
        outcome(lambda f, x: session.checkpoint(f, x, returns="activations"), products, region)
        return session.report().down_bytes - before

    # The region saves its product's operand and the result of exp, of which the sine outside saves the same tensor.
    assert down_bytes(nullcontext) - down_bytes(kept_region) > 0.9 * WIDTH * WIDTH * 4


def test_nothing_is_requested_if_the_region_is_the_whole_call(session: Session) -> None:
    x, w = operands()
    y = session.checkpoint(lambda x: whole(kept_region, x, w), x)
    assert (
        differing(torch.autograd.grad(y.sum(), [x, w]), torch.autograd.grad(whole(nullcontext, x, w).sum(), [x, w]))
        == []
    )
    assert session.report().remote == 0


def test_a_call_without_a_region_still_returns_gradients(session: Session) -> None:
    x, w = operands()
    for region in (kept_region, nullcontext):
        session.checkpoint(lambda x, region=region: products(region, x, w), x).sum().backward()
    (segment,) = session.report().segments
    assert segment.decisions == {Decision.ACTIVATIONS: 1, Decision.GRADIENTS: 1}
    assert list(segment.inside) == ["regions of it keep their activations"]


def test_a_region_around_a_call_has_no_effect_on_it(session: Session) -> None:
    x, w = operands()
    with kept_region():
        session.checkpoint(lambda x: products(nullcontext, x, w), x).sum().backward()
    assert session.report().segments[0].decisions == {Decision.GRADIENTS: 1}


def test_a_region_that_raises_is_closed(session: Session) -> None:
    x, w = operands()

    def failing(x: Tensor) -> Tensor:
        with pytest.raises(ZeroDivisionError), kept_region():
            raise ZeroDivisionError
        return (x @ w).sin()

    session.checkpoint(failing, x).sum().backward()
    assert session.report().segments[0].decisions == {Decision.GRADIENTS: 1}


def test_a_kept_tensor_that_changed_unseen_is_an_error(session: Session) -> None:
    x, w = operands()
    seen: list[Tensor] = []

    def body(x: Tensor) -> Tensor:
        with kept_region():
            y = x.exp()
        seen.append(y.detach())
        return (y @ w).sin()

    loss = session.checkpoint(body, x).sum()
    replace_unseen(seen.pop(), 0, 5)
    with pytest.raises(CheckpointError, match="was kept on the trainer and was changed"):
        loss.backward()
    assert x.grad is None


def test_a_kept_tensor_that_changed_in_place_is_torchs_error(session: Session) -> None:
    x, w = operands()
    seen: list[Tensor] = []

    def body(x: Tensor) -> Tensor:
        with kept_region():
            y = x.exp()
        seen.append(y)
        return (y @ w).sin()

    loss = session.checkpoint(body, x).sum()
    with torch.no_grad():
        seen.pop().zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_backward_can_be_repeated_and_differentiated(session: Session) -> None:
    x, w = operands()

    def second(call: Callable[..., Tensor], region: Region) -> list[Tensor]:
        y = call(lambda x: products(region, x, w), x)
        (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        again = torch.autograd.grad(y.sum(), [x, w], retain_graph=True)
        return [*again, *torch.autograd.grad(first.square().sum(), [x, w])]

    assert differing(second(session.checkpoint, kept_region), second(plain, nullcontext)) == []


def test_a_custom_function_in_a_region_keeps_everything_from_there(session: Session) -> None:
    x, w = operands()

    def body(region: Region, x: Tensor) -> Tensor:
        y = x.exp().sin()
        with region():
            y = TimesOne.apply(y) @ w
        return y.tanh()

    one()
    ours = torch.autograd.grad(session.checkpoint(lambda x: body(kept_region, x), x).sum(), [x, w])
    assert differing(ours, torch.autograd.grad(body(nullcontext, x).sum(), [x, w])) == []


def test_saved_tensor_hooks_around_the_call_see_what_is_kept(session: Session) -> None:
    x, w = operands()
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = session.checkpoint(lambda x: products(kept_region, x, w), x)
    ours = torch.autograd.grad(y.sum(), [x, w])
    assert differing(ours, torch.autograd.grad(products(nullcontext, x, w).sum(), [x, w])) == []
    assert packed


def test_regions_in_an_accumulation_block(session: Session) -> None:
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]

    def body(region: Region, layer: nn.Linear, x: Tensor) -> Tensor:
        with region():
            y = layer(x).exp()
        return y.sin() + x

    def gradients(call: Callable[..., Tensor], region: Region, backward: Callable[[Tensor], None]) -> None:
        torch.manual_seed(1)
        for _ in range(3):
            x = torch.randn(4, WIDTH)
            for layer in layers:
                x = call(lambda x, layer=layer: body(region, layer, x), x)
            backward(x.sum())

    gradients(plain, nullcontext, Tensor.backward)
    expected = [parameter.grad for layer in layers for parameter in layer.parameters()]
    for layer in layers:
        layer.zero_grad()
    for _ in range(2):
        with session.accumulate() as block:
            gradients(session.checkpoint, kept_region, block.backward)
        assert differing([p.grad for layer in layers for p in layer.parameters()], expected) == []
        for layer in layers:
            layer.zero_grad()


def test_a_frozen_module_in_a_region(session: Session) -> None:
    layer = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    x, _ = operands()

    def body(region: Region, x: Tensor) -> Tensor:
        with region():
            y = layer(x)
        return y.tanh().exp()

    (ours,) = torch.autograd.grad(session.checkpoint(lambda x: body(kept_region, x), x).sum(), [x])
    assert differing([ours], [torch.autograd.grad(body(nullcontext, x).sum(), x)[0]]) == []
