"""Autocast shares one cast of a weight among all of its uses: inside segments, outside, before and after them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  torch's own name for it

from backhaul import Decision, Session
from support.bits import Checkpoint, differing, plainly
from support.calls import WIDTH, same, seed
from support.devices import DEVICE

Case = Callable[[Checkpoint, nn.Linear, Tensor], Tensor]


def autocast(**options: Any) -> torch.autocast:
    return torch.autocast(DEVICE, **{"dtype": torch.bfloat16, **options})


def a_loop_of_tied_layers(checkpoint: Checkpoint, linear: nn.Linear, x: Tensor) -> Tensor:
    with autocast():
        h = x * 1
        for _ in range(4):
            h = checkpoint(lambda h: linear(h).sin(), h)
    return h


def a_siamese_encoder(checkpoint: Checkpoint, linear: nn.Linear, x: Tensor) -> Tensor:
    encoder = nn.Sequential(linear, nn.ReLU(), linear)
    with autocast():
        first, second = checkpoint(encoder, x * 1), checkpoint(encoder, x.flip(0))
    return first.float() * second.float()


def once_inside_once_outside(checkpoint: Checkpoint, linear: nn.Linear, x: Tensor) -> Tensor:
    with autocast():
        return linear(checkpoint(lambda h: linear(h).sin(), x * 1))


def outside_before_and_after(checkpoint: Checkpoint, linear: nn.Linear, x: Tensor) -> Tensor:
    with autocast():
        h = linear(x)
        for _ in range(2):
            h = linear(checkpoint(lambda h: linear(F.gelu(linear(h))), h))
    return h


def without_gradients_first(checkpoint: Checkpoint, linear: nn.Linear, x: Tensor) -> Tensor:
    with autocast():
        with torch.no_grad():
            linear(x)
        return checkpoint(lambda h: linear(h).sin(), x * 1)


def with_casts_of_its_own(checkpoint: Checkpoint, linear: nn.Linear, x: Tensor) -> Tensor:
    def fn(h: Tensor) -> Tensor:
        return linear(h) + F.linear(h.to(torch.bfloat16), linear.weight.to(torch.bfloat16))

    with autocast():
        return linear(checkpoint(fn, checkpoint(fn, x * 1)))


def in_full_precision_too(checkpoint: Checkpoint, linear: nn.Linear, x: Tensor) -> Tensor:
    def fn(h: Tensor) -> Tensor:
        return linear(h) * linear.weight.square().sum()

    with autocast():
        return linear(checkpoint(fn, checkpoint(fn, x * 1))) * linear.weight.sum()


def regions_inside(checkpoint: Checkpoint, linear: nn.Linear, x: Tensor) -> Tensor:
    def fn(h: Tensor) -> Tensor:
        with autocast():
            first = linear(h)
        with autocast(enabled=False):
            second = linear(h.float())
        return first.float() + second

    h = checkpoint(fn, checkpoint(fn, x * 1))
    with autocast():
        return linear(checkpoint(fn, checkpoint(fn, h)))


def cleared_inside(checkpoint: Checkpoint, linear: nn.Linear, x: Tensor) -> Tensor:
    def fn(h: Tensor) -> Tensor:
        first = linear(h)
        torch.clear_autocast_cache()
        return linear(first)

    with autocast():
        return linear(checkpoint(fn, checkpoint(fn, linear(x))))


def not_cached(checkpoint: Checkpoint, linear: nn.Linear, x: Tensor) -> Tensor:
    with autocast(cache_enabled=False):
        return linear(checkpoint(lambda h: linear(linear(h)), x * 1))


def of_a_leaf(checkpoint: Checkpoint, linear: nn.Linear, x: Tensor) -> Tensor:
    with autocast():
        return checkpoint(linear, x) + checkpoint(linear, x) + linear(x)


def nested(checkpoint: Checkpoint, linear: nn.Linear, x: Tensor) -> Tensor:
    with autocast():
        h = checkpoint(lambda h: checkpoint(linear, checkpoint(linear, h)), x * 1)
        return checkpoint(linear, h)


def a_cast_made_inside_for_others(checkpoint: Checkpoint, linear: nn.Linear, x: Tensor) -> Tensor:
    """Nothing inside leads to it, and it was made between two uses of its weight."""

    def fn(h: Tensor) -> Tensor:
        first = h + linear.weight[: len(h)]
        return first.tanh() * (h @ linear.weight).detach()

    with autocast():
        h = checkpoint(fn, x * 2) + linear.weight[: len(x)]
        return h @ linear.weight


def in_a_region_of_another_dtype(checkpoint: Checkpoint, linear: nn.Linear, x: Tensor) -> Tensor:
    """Which gets the cast of the region around it."""
    with autocast():
        first = linear.weight @ linear.weight
        with autocast(dtype=torch.float16):
            second = checkpoint(lambda h: (linear.weight @ linear.weight).float() @ h.T, x * 1)
        third = linear.weight @ linear.weight
        return first.float().sum() + second + third.float().sin().sum()


def after_a_region_of_another_dtype(checkpoint: Checkpoint, linear: nn.Linear, x: Tensor) -> Tensor:
    """Whose cast is still there."""
    with autocast():
        with autocast(dtype=torch.float16):
            first = linear.weight @ linear.weight
        second = checkpoint(lambda h: (linear.weight @ linear.weight).float() @ h.T, x * 1)
        return first.float().sum() + second


def a_region_of_another_dtype_after_uses_that_cast_nothing(
    checkpoint: Checkpoint, linear: nn.Linear, x: Tensor
) -> Tensor:
    """Which gets the cast of the region around the segment."""

    def fn(h: Tensor) -> Tensor:
        with autocast(enabled=False):
            first = linear.weight @ linear.weight
        second = first + linear.weight
        with autocast(dtype=torch.float16):
            third = linear.weight @ linear.weight
        return (second + third.float()) @ h.T

    with autocast():
        first = linear.weight @ linear.weight
        return checkpoint(fn, x * 1) + first.float().sum()


def an_op_that_fails_between_regions(checkpoint: Checkpoint, linear: nn.Linear, x: Tensor) -> Tensor:
    """The second region casts the weight again, although an op failed after the first one."""
    odd = torch.ones(3)

    def fn(h: Tensor) -> Tensor:
        with autocast():
            first = linear(h)
        with pytest.raises(RuntimeError, match="size"):
            h.add(odd)
        with autocast():
            return first.float().sin() + linear(first)

    return checkpoint(fn, checkpoint(fn, x * 1))


def an_op_that_fails_first_in_a_region(checkpoint: Checkpoint, linear: nn.Linear, x: Tensor) -> Tensor:
    short = x.detach()[:, 1:]

    def fn(h: Tensor) -> Tensor:
        with autocast():
            first = linear(h)
        with autocast():
            with pytest.raises(RuntimeError, match="shapes"):
                linear(short)
            return first.float().sin() + linear(first)

    return checkpoint(fn, checkpoint(fn, x * 1))


def an_op_that_fails_without_gradients(checkpoint: Checkpoint, linear: nn.Linear, x: Tensor) -> Tensor:
    """It leaves a cast without a history, which later ops share."""
    short = x.detach()[:, 1:]

    def fn(h: Tensor) -> Tensor:
        with autocast():
            with torch.no_grad(), pytest.raises(RuntimeError, match="shapes"):
                linear(short)
            return linear(h).sin()

    return checkpoint(fn, checkpoint(fn, x * 1))


CASES = [
    an_op_that_fails_between_regions,
    an_op_that_fails_first_in_a_region,
    an_op_that_fails_without_gradients,
    a_cast_made_inside_for_others,
    in_a_region_of_another_dtype,
    after_a_region_of_another_dtype,
    a_region_of_another_dtype_after_uses_that_cast_nothing,
    a_loop_of_tied_layers,
    a_siamese_encoder,
    once_inside_once_outside,
    outside_before_and_after,
    without_gradients_first,
    with_casts_of_its_own,
    in_full_precision_too,
    regions_inside,
    cleared_inside,
    not_cached,
    of_a_leaf,
    nested,
]


@pytest.mark.parametrize("case", CASES)
def test_a_weight_used_more_than_once(case: Case, session: Session) -> None:
    for checkpoint in (session.checkpoint, lambda *given: session.checkpoint(*given, returns="activations")):
        for rows in (4, 64) if case is not a_cast_made_inside_for_others else (4,):

            def run(checkpoint: Checkpoint, rows: int = rows) -> list[Tensor | None]:
                linear, x = nn.Linear(WIDTH, WIDTH), torch.randn(rows, WIDTH, requires_grad=True)
                case(checkpoint, linear, x).float().square().sum().backward()
                return [x.grad, linear.weight.grad, linear.bias.grad]

            same(run, checkpoint)
    assert session.report().fallbacks == 0


def test_gradients_of_some_inputs_and_of_gradients(session: Session) -> None:
    def case(checkpoint: Checkpoint) -> tuple[list[Tensor | None], list[Tensor | None]]:
        seed()
        linear, x = nn.Linear(WIDTH, WIDTH), torch.randn(4, WIDTH, requires_grad=True)
        h = a_loop_of_tied_layers(checkpoint, linear, x).float()
        some = [
            *torch.autograd.grad(h.square().sum(), [linear.weight], retain_graph=True),
            *torch.autograd.grad(h.sum(), [x], retain_graph=True),
        ]
        (first,) = torch.autograd.grad(h.sum(), x, create_graph=True)
        first.square().sum().backward()
        return [*some, first.detach()], [x.grad, linear.weight.grad]

    (ours, our_second), (theirs, their_second) = case(session.checkpoint), case(plainly)
    assert differing(ours, theirs) == []
    # The second graph is that of replays: its parts are added up in another order, and in bfloat16.
    torch.testing.assert_close(our_second, their_second, rtol=2**-6, atol=2**-6)


def test_a_loop_inside_one_region_goes_on_with_the_casts_of_its_first_step(session: Session) -> None:
    """As torch does, with and without its own checkpoint: its cache does not notice that a weight changes."""

    def case(checkpoint: Checkpoint) -> list[Tensor | None]:
        linear = nn.Linear(WIDTH, WIDTH)
        optimizer = torch.optim.SGD(linear.parameters(), lr=1.0)
        losses: list[Tensor | None] = []
        with autocast():
            for _ in range(4):
                loss = checkpoint(lambda h: F.gelu(linear(h)), torch.ones(2, WIDTH))
                loss = loss.float().square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
        return [*losses, linear.weight.detach()]

    same(case, session.checkpoint)
    (segment,) = session.report().segments
    assert segment.decisions[Decision.GRADIENTS] == 1
    assert segment.decisions[Decision.KEPT] == 3


def tied_inside(x: Tensor, linear: nn.Linear) -> Tensor:
    with autocast():
        return (linear(linear(x).sin()) + F.linear(x, linear.weight)).float()


@pytest.mark.parametrize("is_batched", [False, True])
def test_gradients_of_gradients_of_casts_inside(is_batched: bool, session: Session) -> None:
    """A replay that is differentiated has no leaves, so autocast casts the weight at each of its uses."""

    def case(checkpoint: Checkpoint) -> tuple[list[Tensor], list[Tensor]]:
        seed()
        linear, x = nn.Linear(WIDTH, WIDTH), torch.randn(4, WIDTH, requires_grad=True)
        y, inputs = checkpoint(tied_inside, x * 1, linear), [x, *linear.parameters()]
        directions = torch.randn(2, *y.shape) if is_batched else torch.randn(y.shape)
        options = {"create_graph": not is_batched, "is_grads_batched": is_batched}
        first = list(torch.autograd.grad(y, inputs, directions, **options))
        if is_batched:
            return first, []
        second = torch.autograd.grad(torch.stack([gradient.square().sum() for gradient in first]).sum(), inputs)
        return [gradient.detach() for gradient in first], list(second)

    (ours, our_second), (theirs, their_second) = case(session.checkpoint), case(plainly)
    assert differing(ours, theirs) == []
    torch.testing.assert_close(our_second, their_second, rtol=2**-6, atol=2**-4)


def test_a_view_that_is_a_leaf(session: Session) -> None:
    """Autocast caches no casts of views, so each use casts it."""

    def case(checkpoint: Checkpoint) -> list[Tensor | None]:
        seed()
        linear, x = nn.Linear(WIDTH, WIDTH), torch.randn(4, 2 * WIDTH)[:, WIDTH:].requires_grad_()
        with autocast():
            checkpoint(lambda x: linear(x) * linear(x.flip(0)) + F.linear(x, linear.weight), x).float().sum().backward()
        return [x.grad, linear.weight.grad]

    assert differing(case(session.checkpoint), case(plainly)) == []
    assert session.report().segments[0].decisions == {Decision.GRADIENTS: 1}
