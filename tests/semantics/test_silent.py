"""Where torch.utils.checkpoint gives a wrong gradient without a word: here it is right, or a named error.

Each case is run twice: plainly and undisturbed, which is what must come out, and checkpointed, with what disturbs it
happening between forward and backward.
"""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  torch's own name for it

from backhaul import BackhaulError, Session
from support.bits import Checkpoint, differing, grad_of, plainly
from support.calls import WIDTH, inputs, same, seed
from support.devices import DEVICE
from support.unseen import replace_unseen

Disturb = Callable[[Callable[[], object]], object]
Case = Callable[[Checkpoint, Disturb], list[Tensor | None]]


def right_or_named(case: Case, checkpoint: Checkpoint) -> None:
    seed()
    expected = case(plainly, lambda _: None)
    seed()
    try:
        ours = case(checkpoint, lambda change: change())
    except BackhaulError as error:
        assert isinstance(error, RuntimeError)
        return
    assert differing(ours, expected) == []


def right(case: Case, checkpoint: Checkpoint) -> None:
    seed()
    expected = case(plainly, lambda _: None)
    seed()
    assert differing(case(checkpoint, lambda change: change()), expected) == []


class Block(nn.Module):
    """Reads a weight, a flag and an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.detached = False
        self.scale = 1.0

    def forward(self, h: Tensor) -> Tensor:
        y = self.linear(h).sin() * self.scale
        y = y.detach() if self.detached else y
        return F.dropout(y * h, 0.5, self.training).exp()


@torch.no_grad()
def double(*tensors: Tensor) -> None:
    for tensor in tensors:
        tensor.mul_(2)


def test_a_parameter_written_in_place_after_forward(anywhere: Checkpoint) -> None:
    def case(checkpoint: Checkpoint, disturb: Disturb) -> list[Tensor | None]:
        block, (x, h) = Block(), inputs()
        y = checkpoint(block, h)
        disturb(lambda: double(block.linear.weight))
        y.sum().backward()
        return [x.grad, *(p.grad for p in block.parameters())]

    right_or_named(case, anywhere)


@pytest.mark.parametrize("lives", [True, False])
def test_a_keyword_or_nested_tensor_mutated_after_forward(lives: bool, anywhere: Checkpoint) -> None:
    def case(checkpoint: Checkpoint, disturb: Disturb) -> list[Tensor | None]:
        (x, h), box = inputs(), {"c": torch.randn(2, WIDTH)}
        mask = torch.randn(2, WIDTH)
        y = checkpoint(lambda h, box, *, mask: (h * box["c"]).sin() * mask, h, box, mask=mask)
        disturb(lambda: double(box["c"], mask))
        if not lives:
            del mask
            box.clear()
        y.sum().backward()
        return [x.grad]

    right_or_named(case, anywhere)


def test_recomputation_gives_other_values(anywhere: Checkpoint, session: Session) -> None:
    def case(checkpoint: Checkpoint, disturb: Disturb) -> list[Tensor | None]:
        (x, h), state = inputs(), {"scale": 1.0}
        y = checkpoint(lambda h: (h * state["scale"]).sin().exp(), h)
        disturb(lambda: state.update(scale=2.0))
        y.sum().backward()
        return [x.grad]

    right(case, anywhere)


def test_recomputation_saves_more(anywhere: Checkpoint, session: Session) -> None:
    def case(checkpoint: Checkpoint, disturb: Disturb) -> list[Tensor | None]:
        (x, h), state = inputs(), {"depth": 2}

        def fn(h: Tensor) -> Tensor:
            for _ in range(state["depth"]):
                h = h.sin()
            return h.exp()

        y = checkpoint(fn, h)
        disturb(lambda: state.update(depth=3))
        y.sum().backward()
        return [x.grad]

    right(case, anywhere)


class Average(nn.Module):
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.full((WIDTH,), 0.3))

    def forward(self, h: Tensor) -> Tensor:
        y = self.linear(h) * (1 + self.mean)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(y.mean(0), alpha=0.1)
        return y.sin()


def test_a_buffer_that_forward_reads_and_updates(anywhere: Checkpoint) -> None:
    def case(checkpoint: Checkpoint) -> list[Tensor | None]:
        module, (x, h) = Average(), inputs()
        checkpoint(module, checkpoint(module, h)).sum().backward()
        return [x.grad, *(p.grad for p in module.parameters()), module.mean]

    same(case, anywhere)


@pytest.mark.parametrize("change", [lambda block: block.eval(), lambda block: setattr(block, "scale", 3.0)])
def test_an_attribute_or_flag_changes_between_two_live_forwards(
    change: Callable[[Block], object], anywhere: Checkpoint, session: Session
) -> None:
    def case(checkpoint: Checkpoint, _: Disturb) -> list[Tensor | None]:
        block, (x, h) = Block(), inputs()
        first = checkpoint(block, h)
        change(block)
        second = checkpoint(block, h)
        (first + second).sum().backward()
        return [x.grad, *(p.grad for p in block.parameters())]

    right(case, anywhere)


@pytest.mark.parametrize("source", ["random", "NumPy", "generator"])
def test_draws_that_torch_does_not_preserve(source: str, anywhere: Checkpoint, session: Session) -> None:
    def case(checkpoint: Checkpoint, _: Disturb) -> list[Tensor | None]:
        (x, h), generator = inputs(), torch.Generator(DEVICE).manual_seed(3)
        draws: dict[str, Callable[[], Any]] = {
            "random": random.random,
            "NumPy": lambda: float(np.random.rand()),
            "generator": lambda: torch.rand(WIDTH, generator=generator),
        }
        checkpoint(lambda h: (h * draws[source]()).sin(), h).sum().backward()
        return [x.grad]

    right(case, anywhere)


def test_batch_norm_counts_a_step_once(anywhere: Checkpoint) -> None:
    def case(checkpoint: Checkpoint) -> list[Tensor | None]:
        norm, (x, h) = nn.BatchNorm1d(WIDTH), inputs()
        checkpoint(lambda h: norm(h).sin(), h).sum().backward()
        if checkpoint is not plainly:
            assert norm.num_batches_tracked is not None
            assert norm.num_batches_tracked.item() == 1
        return [x.grad, *(p.grad for p in norm.parameters()), *norm.buffers()]

    same(case, anywhere)


def test_a_list_is_appended_to_once(anywhere: Checkpoint) -> None:
    x, _ = inputs()
    given: list[str] = []

    def fn(x: Tensor, given: list[str]) -> Tensor:
        given.append("called")
        return x.sin().exp() * len(given)

    anywhere(fn, x, given).sum().backward()
    assert given == ["called"]
    assert torch.equal(grad_of(x), torch.autograd.grad((x.sin().exp() * 1).sum(), x)[0])


def test_a_captured_list_is_appended_to_once_on_a_worker(checkpoint: Checkpoint) -> None:
    x, _ = inputs()
    captured: list[str] = []

    def fn(x: Tensor) -> Tensor:
        captured.append("called")
        return x.sin().exp()

    checkpoint(fn, x).sum().backward()
    assert captured == ["called"]


UNSEEN: dict[str, Callable[[Tensor], object]] = {
    ".data": lambda t: t.data.mul_(2),
    "NumPy or a kernel": lambda t: replace_unseen(t, 2),
}


@pytest.mark.parametrize("what", ["argument", "keyword", "captured", "parameter"])
def test_a_write_that_no_version_counter_sees(what: str, anywhere: Checkpoint) -> None:
    for write in UNSEEN.values():
        right_or_named(unseen_write(what, write), anywhere)


def unseen_write(what: str, write: Callable[[Tensor], object]) -> Case:
    def case(checkpoint: Checkpoint, disturb: Disturb) -> list[Tensor | None]:
        block, (x, h) = Block(), inputs()
        argument, keyword, captured = (torch.randn(2, WIDTH) for _ in range(3))
        targets = {"argument": argument, "keyword": keyword, "captured": captured, "parameter": block.linear.weight}
        y = checkpoint(lambda h, c, *, k: (block(h) * c).sin() * (k * captured).cos(), h, argument, k=keyword)
        disturb(lambda: write(targets[what]))
        y.sum().backward()
        return [x.grad, *(p.grad for p in block.parameters())]

    return case


class Experts(nn.Module):
    """Routes each row to one of two, by a bias that follows the load, as balancing without an auxiliary loss does."""

    bias: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.register_buffer("bias", torch.zeros(2))

    def forward(self, h: Tensor) -> Tensor:
        scores = self.router(h).softmax(-1)
        chosen = (scores + self.bias).argmax(-1).tolist()
        with torch.no_grad():
            self.bias[chosen[0]] -= 2.0
            self.bias[1 - chosen[0]] += 2.0
        rows = [self.experts[expert](h[row]).sin() * scores[row, expert] for row, expert in enumerate(chosen)]
        return torch.stack(rows)


@pytest.mark.parametrize("later", [True, False])
def test_routing_that_flips_on_recomputation(later: bool, anywhere: Checkpoint) -> None:
    def case(checkpoint: Checkpoint, disturb: Disturb) -> list[Tensor | None]:
        experts, (x, h) = Experts(), inputs()
        y = checkpoint(experts, h)
        if later:
            disturb(experts.bias.neg_)
        y.sum().backward()
        return [x.grad, *(p.grad for p in experts.parameters())]

    right_or_named(case, anywhere)


class LowRank(nn.Module):
    """LoRA at initialisation: its branch is zero times something."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Parameter(torch.zeros(2, WIDTH))
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, h: Tensor) -> Tensor:
        return self.base(h) + self.down(h).tanh() @ self.up + self.gate * self.down(h).sum()


def test_a_branch_times_zero_with_stale_weights(anywhere: Checkpoint) -> None:
    def case(checkpoint: Checkpoint, disturb: Disturb) -> list[Tensor | None]:
        layer, (x, h) = LowRank(), inputs()
        y = checkpoint(layer, h)
        disturb(lambda: layer.down.weight.data.mul_(2))
        y.sum().backward()
        return [x.grad, *(p.grad for p in layer.parameters())]

    right_or_named(case, anywhere)


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("how", ["detach", "no_grad"])
def test_an_attribute_that_toggles_gradients_between_two_live_forwards(
    how: str, frozen: bool, anywhere: Checkpoint, session: Session
) -> None:
    class Toggled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.frozen = frozen

        def forward(self, h: Tensor) -> Tensor:
            if how == "detach":
                y = self.linear(h).sin()
                y = y.detach() if self.frozen else y
            else:
                with torch.set_grad_enabled(not self.frozen):
                    y = self.linear(h).sin()
            return (y * h).exp()

    def case(checkpoint: Checkpoint, _: Disturb) -> list[Tensor | None]:
        module, (x, h) = Toggled(), inputs()
        first = checkpoint(module, h)
        module.frozen = not frozen
        second = checkpoint(module, h)
        (first + second * 3).sum().backward()
        return [x.grad, *(p.grad for p in module.parameters())]

    right(case, anywhere)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_weights_changed_by_a_fused_step(
    optimizer: type[torch.optim.SGD | torch.optim.AdamW], anywhere: Checkpoint
) -> None:
    def case(checkpoint: Checkpoint, disturb: Disturb) -> list[Tensor | None]:
        block, (x, h) = Block(), inputs()
        stepper = optimizer(block.parameters(), lr=0.5, fused=True)
        other = checkpoint(block, h.detach())
        y = checkpoint(block, h)
        other.sum().backward()
        earlier = [grad_of(p).clone() for p in block.parameters()]
        disturb(stepper.step)
        stepper.zero_grad()
        y.sum().backward()
        return [*earlier, x.grad, *(p.grad for p in block.parameters())]

    right_or_named(case, anywhere)


def test_a_boundary_whose_address_another_takes(anywhere: Checkpoint) -> None:
    def case(checkpoint: Checkpoint, disturb: Disturb) -> list[Tensor | None]:
        block, (x, h), mask = Block(), inputs(), torch.randn(2, WIDTH)
        y = checkpoint(lambda h, *, mask: block(h * mask), h, mask=mask)
        del h, mask
        others = [torch.full((2, WIDTH), 7.0) for _ in range(64)]
        y.sum().backward()
        return [x.grad, *(p.grad for p in block.parameters()), others[0]]

    right_or_named(case, anywhere)


@pytest.mark.parametrize("leaf", [False, True])
@pytest.mark.parametrize("apart", [False, True])
def test_an_auxiliary_loss_kept_in_an_attribute(
    apart: bool, leaf: bool, anywhere: Checkpoint, session: Session
) -> None:
    class Auxiliary(Block):
        def forward(self, h: Tensor) -> Tensor:
            y = super().forward(h)
            self.loss = self.linear(y).square().mean()
            return y

    def case(checkpoint: Checkpoint, _: Disturb) -> list[Tensor | None]:
        module, (x, h) = Auxiliary(), inputs()
        y = checkpoint(module, x if leaf else h)
        if apart:
            y.sum().backward(retain_graph=True)
            module.loss.backward()
        else:
            (y.sum() + module.loss).backward()
        return [x.grad, *(p.grad for p in module.parameters())]

    right(case, anywhere)


def test_a_list_of_auxiliary_losses_added_up_after_another_backward(checkpoint: Checkpoint) -> None:
    def case(checkpoint: Checkpoint) -> list[Tensor | None]:
        block, (x, h), losses = Block(), inputs(), []

        def fn(h: Tensor) -> Tensor:
            y = block(h)
            losses.append(block.linear(y).square().mean())
            return y

        checkpoint(fn, h).sum().backward(retain_graph=True)
        sum(losses).backward()
        return [x.grad, *(p.grad for p in block.parameters())]

    same(case, checkpoint)


def test_an_output_that_is_a_view_of_an_input_is_written_to(anywhere: Checkpoint) -> None:
    def case(checkpoint: Checkpoint, _: Disturb) -> list[Tensor | None]:
        x, h = inputs()
        view, other = checkpoint(lambda h: (h.view(-1), (h + 1).sin()), h)
        view.mul_(3)
        (view.sum() + h.sum() + other.sum()).backward()
        return [x.grad, view.detach()]

    right_or_named(case, anywhere)


def test_an_output_that_is_a_view_of_a_saved_input_is_written_to(anywhere: Checkpoint) -> None:
    x, h = inputs()
    view, other = anywhere(lambda h: (h.view(-1), h.sin().exp()), h)
    with torch.no_grad():
        view.mul_(3)
    try:
        other.sum().backward()
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
        return
    assert torch.equal(grad_of(x), torch.autograd.grad(x.sin().exp().sum(), x)[0])
