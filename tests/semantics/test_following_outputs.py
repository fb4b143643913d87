"""Outputs that other outputs of the same call follow from: what ordinary PyTorch does with them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backhaul import Session
from support.bits import Checkpoint, grad_of, plainly
from support.calls import WIDTH, inputs, same, seed
from support.loopback import Loopback


def chain(x: Tensor) -> tuple[Tensor, ...]:
    y = x.sin().cos()
    return y, y.sin().exp()


def chain_of_three(x: Tensor) -> tuple[Tensor, ...]:
    y = x.sin()
    z = y.exp().sin()
    return y, z, (y * z).cos()


def backwards_in_order(x: Tensor) -> tuple[Tensor, ...]:
    y, z = chain(x)
    return z, y


def with_a_way_past_it(x: Tensor) -> tuple[Tensor, ...]:
    """The second follows from the first, and from its inside as well: no cut divides them."""
    inside = x.sin()
    y = inside.exp()
    return y, (y * inside).cos()


def siblings(x: Tensor) -> tuple[Tensor, ...]:
    inside = x.sin()
    return inside.exp(), inside.cos()


FUNCTIONS = [chain, chain_of_three, backwards_in_order, with_a_way_past_it, siblings]
Use = Callable[[tuple[Tensor, ...], Tensor], list[Tensor | None]]


def total(outputs: tuple[Tensor, ...]) -> Tensor:
    return torch.stack([output.square().sum() for output in outputs]).sum()


def hook_that_changes(outputs: tuple[Tensor, ...], x: Tensor) -> list[Tensor | None]:
    for output in outputs:
        output.register_hook(lambda gradient: gradient.clamp(-0.05, 0.05) * 3)
    total(outputs).backward()
    return [x.grad]


def hook_that_looks(outputs: tuple[Tensor, ...], x: Tensor) -> list[Tensor | None]:
    seen: list[Tensor | None] = []
    for output in outputs:
        output.register_hook(lambda gradient: seen.append(gradient.clone()))
    total(outputs).backward()
    return [*seen, x.grad]


def retain_grad(outputs: tuple[Tensor, ...], x: Tensor) -> list[Tensor | None]:
    for output in outputs:
        output.retain_grad()
    total(outputs).backward()
    return [*(output.grad for output in outputs), x.grad]


def gradient_of_each_in_each(outputs: tuple[Tensor, ...], x: Tensor) -> list[Tensor | None]:
    return [
        torch.autograd.grad(above.sum(), below, retain_graph=True, allow_unused=True)[0]
        for above in outputs
        for below in (*outputs, x)
    ]


def inputs_of_backward(outputs: tuple[Tensor, ...], x: Tensor) -> list[Tensor | None]:
    torch.autograd.backward([total(outputs)], inputs=[outputs[0], x], retain_graph=True)
    torch.autograd.backward([outputs[-1].sum()], inputs=[outputs[0]])
    return [outputs[0].grad, x.grad]


def only_the_last(outputs: tuple[Tensor, ...], x: Tensor) -> list[Tensor | None]:
    outputs[-1].sum().backward()
    return [x.grad]


def only_the_first(outputs: tuple[Tensor, ...], x: Tensor) -> list[Tensor | None]:
    outputs[0].sum().backward()
    return [x.grad]


def twice(outputs: tuple[Tensor, ...], x: Tensor) -> list[Tensor | None]:
    total(outputs).backward(retain_graph=True)
    total(outputs).backward()
    return [x.grad]


def backward_in_a_hook(outputs: tuple[Tensor, ...], x: Tensor) -> list[Tensor | None]:
    """Of what follows from the output, while its own gradient is on its way."""
    seen: list[Tensor | None] = []

    def hook(gradient: Tensor) -> None:
        handle.remove()
        with torch.enable_grad():
            last = outputs[-1].sum()
        seen.append(torch.autograd.grad(last, x, retain_graph=True)[0])

    handle = outputs[0].register_hook(hook)
    total(outputs).backward(retain_graph=True)
    return [*seen, x.grad]


USES: list[Use] = [
    hook_that_changes,
    hook_that_looks,
    retain_grad,
    gradient_of_each_in_each,
    inputs_of_backward,
    only_the_last,
    only_the_first,
    twice,
    backward_in_a_hook,
]


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("fn", FUNCTIONS)
def test_what_people_do_with_outputs(fn: Any, use: Use, loopback: Loopback) -> None:
    def case(checkpoint: Checkpoint) -> list[Tensor | None]:
        x = torch.randn(2, WIDTH, requires_grad=True)
        return use(checkpoint(fn, x * 1), x)

    same(case, loopback.checkpoint)
    same(case, lambda *given: loopback.checkpoint(*given, returns="activations"))


@pytest.mark.parametrize("fn", FUNCTIONS)
def test_a_gradient_of_a_gradient(fn: Any, session: Session) -> None:
    def case(checkpoint: Checkpoint) -> list[Tensor]:
        seed()
        x = torch.randn(2, WIDTH, requires_grad=True)
        outputs = checkpoint(fn, x * 1)
        outputs[0].retain_grad()
        (first,) = torch.autograd.grad(total(outputs), outputs[0], create_graph=True)
        outputs[0].register_hook(lambda gradient: gradient * 3)
        first.sum().backward()
        return [first.detach(), outputs[0].grad, x.grad]

    ours, theirs = case(session.checkpoint), case(plainly)
    assert torch.equal(ours[0], theirs[0])
    for mine, other in zip(ours[1:], theirs[1:], strict=True):
        # The second graph is that of a replay: autograd adds its parts up in another order.
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def test_a_block_that_also_gives_its_hidden_state(session: Session) -> None:
    """With weights of both stages, one of them in both."""

    def case(checkpoint: Checkpoint) -> list[Tensor | None]:
        (x, h), first, second = inputs(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def fn(h: Tensor) -> tuple[Tensor, Tensor]:
            middle = first(h).tanh()
            return middle, second(first(middle).sin()).tanh()

        middle, out = checkpoint(fn, h)
        middle.register_hook(lambda gradient: gradient.clamp(-0.05, 0.05))
        (out.sum() + 0.01 * middle.square().sum()).backward()
        return [x.grad, *(p.grad for layer in (first, second) for p in layer.parameters())]

    same(case, lambda *given: session.checkpoint(*given, strict=True))
    (segment,) = session.report().segments
    assert segment.inside == {}  # gradients came back, stage by stage
    assert session.report().remote == 2


def test_outputs_that_no_cut_divides_come_back_as_activations(session: Session) -> None:
    x, h = inputs()
    total(session.checkpoint(with_a_way_past_it, h, strict=True)).backward()
    (segment,) = session.report().segments
    assert list(segment.inside) == [
        "its outputs share a part of its inside, but lead to different inputs or to each other"
    ]
    assert x.grad is not None


class Rounded(torch.autograd.Function):
    """Like many custom functions, it gives zeros where it gets no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def interleaved(checkpoint: Checkpoint) -> list[Tensor | None]:
    """Outputs of two kinds, the nodes of which lie between each other."""
    linear, (x, h) = nn.Linear(WIDTH, WIDTH), inputs()

    def fn(h: Tensor) -> tuple[Tensor, ...]:
        inside = h.tanh()
        early, other, late = inside * 2, linear(h), linear(inside)
        return linear(late), early, other

    late, early, other = checkpoint(fn, h)
    (linear(late) + early + other).square().sum().backward()
    return [x.grad, linear.weight.grad]


def an_output_that_nobody_uses(checkpoint: Checkpoint) -> list[Tensor | None]:
    encoder, head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.AdamW([*encoder.parameters(), *head.parameters()], lr=0.1)
    weight = Rounded.apply(head.weight)

    def fn(h: Tensor) -> tuple[Tensor, Tensor]:
        inside = encoder(h).tanh()
        return inside.sin(), inside @ weight

    used, _ = checkpoint(fn, inputs()[1])
    used.sum().backward()
    gradient = head.weight.grad
    optimizer.step()  # decays what has a gradient
    return [gradient, head.weight.detach(), encoder.weight.detach()]


def a_hook_on_a_weight_of_an_output_that_nobody_uses(checkpoint: Checkpoint) -> list[Tensor | None]:
    (x, h), weights = inputs(), [torch.randn(WIDTH, WIDTH, requires_grad=True) for _ in range(2)]
    weights[1].register_hook(lambda gradient: gradient * 2)
    weights[1].register_post_accumulate_grad_hook(lambda weight: weight.data.sub_(weight.grad))

    def fn(h: Tensor) -> tuple[Tensor, Tensor]:
        inside = h.sin()
        return inside @ weights[0], inside @ weights[1]

    used, _ = checkpoint(fn, h)
    used.sum().backward()
    return [x.grad, *(weight.grad for weight in weights)]


def a_hook_on_an_output_that_does_not_lead_there(checkpoint: Checkpoint) -> list[Tensor | None]:
    (_, h), weight = inputs(), torch.randn(WIDTH, WIDTH, requires_grad=True)
    ran: list[Tensor] = []

    def fn(h: Tensor) -> tuple[Tensor, Tensor]:
        inside = h.sin()
        return inside.cos(), inside @ weight

    outputs = checkpoint(fn, h)
    outputs[0].register_hook(ran.append)
    added: Any = sum(outputs)
    gradients = torch.autograd.grad(added.sum(), [weight])
    return [*gradients, torch.tensor(len(ran))]


@pytest.mark.parametrize(
    "case",
    [
        interleaved,
        an_output_that_nobody_uses,
        a_hook_on_a_weight_of_an_output_that_nobody_uses,
        a_hook_on_an_output_that_does_not_lead_there,
    ],
)
def test_outputs_that_lead_to_different_things(case: Any, session: Session) -> None:
    same(case, session.checkpoint)
    insides = [reason for segment in session.report().segments for reason in segment.inside]
    assert "its outputs share a part of its inside, but lead to different inputs or to each other" in insides


@pytest.mark.parametrize("batched", [False, True])
def test_an_output_that_is_written_to_inside_can_be_derived_twice(batched: bool, session: Session) -> None:
    def case(checkpoint: Checkpoint) -> list[Tensor]:
        seed()
        (x, h), first, second = inputs(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def fn(h: Tensor) -> tuple[Tensor, Tensor]:
            inside = nn.functional.elu_(first(h))
            return inside, second(inside).tanh()

        outputs = checkpoint(fn, h)
        if batched:
            gradients = torch.stack([torch.ones(2, WIDTH), torch.full((2, WIDTH), 2.0)])
            added: Any = sum(outputs)
            return [*torch.autograd.grad(added, [x, first.weight], gradients, is_grads_batched=True)]
        (gradient,) = torch.autograd.grad(total(outputs), x, create_graph=True)
        gradient.square().sum().backward()
        return [gradient.detach(), grad_of(x), grad_of(first.weight), grad_of(second.weight)]

    for mine, other in zip(case(session.checkpoint), case(plainly), strict=True):
        # As above: autograd adds the parts of the second graph up in another order.
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)
    assert session.report().fallbacks == 0
