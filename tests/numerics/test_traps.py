"""Functions that once gave, or could give, a wrong gradient without a word. Each says what a plain call gives."""

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  torch's own name for it

from backhaul import BackhaulError, CheckpointError, Session
from support.bits import Checkpoint, differing, grad_of, plainly, seed_generators
from support.calls import WIDTH, as_without_checkpointing, inputs, same


@as_without_checkpointing
def test_as_strided_counts_from_the_start_of_the_callers_storage(checkpoint: Checkpoint) -> list[Tensor | None]:
    x = torch.zeros(200)[16:80].detach().requires_grad_()
    w = torch.ones(2, requires_grad=True)
    checkpoint(lambda x: x.as_strided((2,), (1,), 18) + w, x).sum().backward()
    return [x.grad, w.grad]


@pytest.mark.parametrize("layer", [lambda: nn.LSTM(WIDTH, WIDTH, batch_first=True), nn.RReLU])
def test_memory_that_numpy_wrote_goes_into_an_op_with_undefined_saves(
    layer: Callable[[], nn.Module], checkpoint: Checkpoint
) -> None:
    def case(checkpoint: Checkpoint) -> list[Tensor | None]:
        module, (x, h) = layer(), inputs()

        def fn(h: Tensor) -> Tensor:
            z = torch.zeros(WIDTH)
            z.numpy()[:] = 3
            out = module(h + z)
            return out[0] if isinstance(out, tuple) else out

        checkpoint(fn, h).sum().backward()
        return [x.grad, *(p.grad for p in module.parameters())]

    seed_generators(1)
    expected = case(plainly)
    seed_generators(1)
    with contextlib.suppress(CheckpointError):  # named is as good
        assert differing(case(checkpoint), expected) == []


@as_without_checkpointing
def test_geometry_from_memory_that_numpy_wrote(checkpoint: Checkpoint) -> list[Tensor | None]:
    x = torch.zeros(6, requires_grad=True)

    def fn(h: Tensor) -> Tensor:
        start = torch.zeros((), dtype=torch.long)
        start.numpy()[...] = 3
        return h.narrow(0, start, 1) * 1.0

    checkpoint(fn, x).sum().backward()
    return [x.grad]


@pytest.mark.parametrize("captured", [False, True])
@as_without_checkpointing
def test_a_source_detached_after_use(captured: bool, checkpoint: Checkpoint) -> list[Tensor | None]:
    x, h = inputs()
    w = torch.randn(WIDTH, requires_grad=True)

    def fn(*_: Tensor) -> Tensor:
        y = h * 2 + w
        h.detach_()
        return y

    checkpoint(fn, *([] if captured else [h])).sum().backward()
    return [x.grad, w.grad]


@as_without_checkpointing
def test_grad_mode_left_off(checkpoint: Checkpoint) -> list[Tensor | None]:
    linear, (x, h) = nn.Linear(WIDTH, WIDTH), inputs()

    def fn(h: Tensor) -> Tensor:
        y = linear(h).sin()
        torch.set_grad_enabled(False)
        return y

    y = checkpoint(fn, h)
    torch.set_grad_enabled(True)
    (y.sum() + x.sum()).backward()
    return [x.grad, linear.weight.grad]


def _hooked_by_a_forward_hook(module: nn.Module, run: Callable[[], Tensor]) -> list[Tensor | None]:
    got: list[Tensor] = []
    handle = module.register_forward_hook(lambda _module, _args, out: got.append(out))
    y = run()
    handle.remove()
    got[0].register_hook(lambda gradient: gradient * 2)
    y.sum().backward()
    return []


@as_without_checkpointing
def test_an_output_that_a_forward_hook_keeps(checkpoint: Checkpoint) -> list[Tensor | None]:
    linear, (x, h) = nn.Linear(WIDTH, WIDTH), inputs()
    _hooked_by_a_forward_hook(linear, lambda: checkpoint(linear, h))
    return [x.grad, linear.weight.grad]


@pytest.mark.parametrize("form", [lambda y: y, lambda y: (y, 1), lambda y: {"a": [y]}, lambda y: y.view(-1)])
@as_without_checkpointing
def test_an_output_that_the_module_keeps(form: Callable[[Tensor], Any], checkpoint: Checkpoint) -> list[Tensor | None]:
    linear, (x, h) = nn.Linear(WIDTH, WIDTH), inputs()
    kept: list[Tensor] = []

    def fn(h: Tensor) -> Any:
        kept.append(linear(h))
        return form(kept[0])

    (y,) = (t for t in torch.utils._pytree.tree_leaves(checkpoint(fn, h)) if isinstance(t, Tensor))
    kept[0].retain_grad()
    (y.square().sum() + kept[0].sin().sum()).backward()
    return [x.grad, linear.weight.grad, kept[0].grad]


@as_without_checkpointing
def test_an_output_that_retains_its_gradient(checkpoint: Checkpoint) -> list[Tensor | None]:
    linear, (x, h) = nn.Linear(WIDTH, WIDTH), inputs()

    def fn(h: Tensor) -> Tensor:
        y = linear(h)
        y.retain_grad()
        return y

    y = checkpoint(fn, h)
    y.square().sum().backward()
    return [x.grad, y.grad]


@as_without_checkpointing
def test_a_node_of_an_output_that_is_kept(checkpoint: Checkpoint) -> list[Tensor | None]:
    linear, (x, h) = nn.Linear(WIDTH, WIDTH), inputs()
    nodes: list[Any] = []

    def fn(h: Tensor) -> Tensor:
        y = linear(h).sin()
        nodes.append(y.grad_fn)
        return y

    y = checkpoint(fn, h)
    nodes[0].register_prehook(lambda gradients: (gradients[0] * 2,))
    y.sum().backward()
    return [x.grad, linear.weight.grad]


def test_a_container_that_is_kept_stays_the_same(checkpoint: Checkpoint) -> None:
    linear, (_, h) = nn.Linear(WIDTH, WIDTH), inputs()
    state = {"h": h}

    def fn(state: dict[str, Tensor]) -> dict[str, Tensor]:
        state["h"] = linear(state["h"])
        return state

    assert checkpoint(fn, state) is state


def test_what_nobody_else_keeps_returns_gradients(session: Session) -> None:
    linear, (h, _) = nn.Linear(WIDTH, WIDTH), inputs()

    @dataclass
    class Out:
        y: Tensor
        more: tuple[Tensor, ...]

    torch.utils._pytree.register_dataclass(Out)

    def fn(h: Tensor) -> dict[str, Any]:
        y = linear(h)
        return {"view": (y * 2).view(-1), "more": [y.exp(), (y.sin(),)], "out": Out(y.cos(), (y.relu(),))}

    for function in (linear, fn, nn.Sequential(linear, nn.Flatten())):
        returned = session.checkpoint(function, h)
        sum(t.sum() for t in torch.utils._pytree.tree_leaves(returned)).backward()
    assert [decision.value for segment in session.report().segments for decision in segment.decisions] == [
        "gradients"
    ] * 3


def test_a_parameter_written_during_backward(checkpoint: Checkpoint) -> None:
    first, second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    x, h = inputs()
    second(first(h).sin()).square().sum().backward()
    expected = grad_of(x)
    x, h = (t.detach().requires_grad_() for t in (x, h))

    def write(_: Tensor) -> None:
        first.weight.data.mul_(2)

    handle = second.weight.register_post_accumulate_grad_hook(write)
    try:
        checkpoint(lambda h: second(first(h).sin()), h).square().sum().backward()
    except BackhaulError:
        return
    finally:
        handle.remove()
    assert torch.equal(grad_of(h), expected)


def test_flushed_denormals(checkpoint: Checkpoint) -> None:
    def case(checkpoint: Checkpoint) -> list[Tensor | None]:
        x = torch.ones(4, requires_grad=True)
        (checkpoint(lambda h: h * 1e-20, x) * 1e-20).sum().backward()
        return [x.grad]

    torch.set_flush_denormal(True)
    try:
        same(case, checkpoint)
        (gradient,) = case(checkpoint)
        assert gradient is not None
        assert torch.count_nonzero(gradient) == 0
    finally:
        torch.set_flush_denormal(False)


def test_the_callers_storages_can_still_be_resized(checkpoint: Checkpoint) -> None:
    x = torch.randn(8, requires_grad=True)
    p = torch.randn(8)
    checkpoint(lambda h: (h * p).sin(), x).sum().backward()
    assert p.resize_(20).numel() == 20


@as_without_checkpointing
def test_a_small_captured_tensor_may_move_on(checkpoint: Checkpoint) -> list[Tensor | None]:
    linear, (x, h) = nn.Linear(WIDTH, WIDTH), inputs()
    step = torch.zeros(())

    def fn(h: Tensor) -> Tensor:
        return (linear(h) + step).tanh() * step.cos()

    for _ in range(6):
        h = checkpoint(fn, h)
        step += 1
    h.sum().backward()
    return [x.grad, linear.weight.grad]


def test_threads_that_share_a_graph(checkpoint: Checkpoint) -> None:
    linear, (x, h) = nn.Linear(WIDTH, WIDTH), inputs()
    loss = checkpoint(nn.Sequential(linear, nn.Tanh(), linear, nn.Tanh()), h).square().sum()
    outcomes: list[Any] = []

    def backward() -> None:
        try:
            outcomes.append(torch.autograd.grad(loss, x, retain_graph=True)[0])
        except BaseException as error:
            outcomes.append(error)

    threads = [threading.Thread(target=backward) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outcomes) == 4
    assert all(torch.equal(gradient, outcomes[0]) for gradient in outcomes)


def test_an_argument_made_in_another_thread(session: Session) -> None:
    linear, (x, h) = nn.Linear(WIDTH, WIDTH), inputs()
    expected = torch.autograd.grad(linear(h).sin().sum(), x, retain_graph=True)[0]
    gradients: list[Tensor] = []

    def run() -> None:
        y = session.checkpoint(lambda h: linear(h).sin(), h, strict=True)
        gradients.append(torch.autograd.grad(y.sum(), x)[0])

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert torch.equal(gradients[0], expected)


@pytest.mark.parametrize("regions", [1, 2, 3])
def test_a_weight_is_cast_once_per_autocast_region(regions: int, checkpoint: Checkpoint, session: Session) -> None:
    def case(checkpoint: Checkpoint) -> list[Tensor | None]:
        linear, (x, h) = nn.Linear(WIDTH, WIDTH), inputs()

        def fn(h: Tensor) -> Tensor:
            for _ in range(regions):
                with torch.autocast("cpu", torch.bfloat16):
                    h = linear(h) + linear(h)
            return h

        checkpoint(fn, h).float().sum().backward()
        return [x.grad, linear.weight.grad, linear.bias.grad]

    same(case, checkpoint)
    assert session.report().fallbacks == 0


def test_what_only_passes_through_is_returned_as_it_is(checkpoint: Checkpoint, session: Session) -> None:
    def case(checkpoint: Checkpoint) -> list[Tensor | None]:
        linear, (x, h) = nn.Linear(WIDTH, WIDTH), inputs()
        states = torch.randn(2, WIDTH, requires_grad=True) * 1
        unused = x * 2

        def fn(h: Tensor, states: Tensor, unused: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            return linear(h) * states, states, unused, linear.weight

        y, same_states, same_unused, weight = checkpoint(fn, h, states, unused)
        assert (same_states is states, same_unused is unused, weight is linear.weight) == (True, True, True)
        (y.sin().sum() + same_states.sum() + same_unused.sum() + weight.sum()).backward()
        return [x.grad, linear.weight.grad, linear.bias.grad]

    same(case, checkpoint)
    assert session.report().remote == 1


def test_an_argument_that_numpy_writes_to_between_its_uses(checkpoint: Checkpoint) -> None:
    def case(checkpoint: Checkpoint) -> list[Tensor | None]:
        x, h = inputs()
        c = torch.ones(WIDTH)

        def fn(h: Tensor, c: Tensor) -> Tensor:
            y = h + c
            c.numpy()[:] = 5
            return y * c

        checkpoint(fn, h, c).sum().backward()
        return [x.grad]

    seed_generators(1)
    expected = case(plainly)
    seed_generators(1)
    with contextlib.suppress(CheckpointError):  # named is as good
        assert differing(case(checkpoint), expected) == []


def test_values_that_a_worker_refuses_are_the_trainers_own_business(checkpoint: Checkpoint, session: Session) -> None:
    def case(checkpoint: Checkpoint) -> list[Tensor | None]:
        image = torch.randn(1, 1, 4, 4, requires_grad=True)
        grid = torch.rand(1, 2, 2, 2)
        grid[0, 0, 0, 0] = torch.nan  # as in a run that diverges
        checkpoint(lambda image: F.grid_sample(image, grid, align_corners=False).square(), image).sum().backward()
        return [image.grad]

    same(case, checkpoint)
    assert session.report().fallbacks == 1


def test_a_like_op_that_autograd_does_not_know(checkpoint: Checkpoint, session: Session) -> None:
    def case(checkpoint: Checkpoint) -> list[Tensor | None]:
        x, h = inputs()
        checkpoint(lambda h: h * torch.randint_like(h, 5), h).sum().backward()
        return [x.grad]

    same(case, checkpoint)
    assert session.report().fallbacks == 0
