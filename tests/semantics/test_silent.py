"""Where torch.utils.checkpoint gives a wrong gradient without a word: here it is right, or a named error.

Each case is run twice: plainly and undisturbed, which is what must come out, and checkpointed, with what disturbs it
happening between forward and backward.
"""

import random
from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  torch's own name for it

from backhaul import BackhaulError
from support.bits import Checkpoint, differing, grad_of, plainly
from support.calls import WIDTH, as_without_checkpointing, inputs, seed
from support.devices import DEVICE
from support.unseen import replace_unseen

Disturb = Callable[[Callable[[], object]], object]
Case = Callable[..., list[Tensor | None]]


@pytest.fixture
def disturb() -> Disturb:
    """Makes a change between forward and backward. The plain run of `right` and `right_or_named` goes undisturbed."""
    return lambda change: change()


def right(case: Case) -> Callable[..., None]:
    """Makes a test of a case whose results must be those of the plain run, whatever disturbs the checkpointed one."""

    @wraps(case)
    def compared(anywhere: Checkpoint, **given: Any) -> None:
        seed()
        expected = case(anywhere=plainly, **({**given, "disturb": lambda _: None} if "disturb" in given else given))
        seed()
        assert differing(case(anywhere=anywhere, **given), expected) == []

    return compared


def right_or_named(case: Case) -> Callable[..., None]:
    """As `right`, but one of our errors will do."""
    compared = right(case)

    @wraps(case)
    def tolerant(**given: Any) -> None:
        try:
            compared(**given)
        except BackhaulError as error:
            assert isinstance(error, RuntimeError)

    return tolerant


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


@right_or_named
def test_a_parameter_written_in_place_after_forward(anywhere: Checkpoint, disturb: Disturb) -> list[Tensor | None]:
    block, (x, h) = Block(), inputs()
    y = anywhere(block, h)
    disturb(lambda: double(block.linear.weight))
    y.sum().backward()
    return [x.grad, *(p.grad for p in block.parameters())]


@pytest.mark.parametrize("lives", [True, False])
@right_or_named
def test_a_keyword_or_nested_tensor_mutated_after_forward(
    lives: bool, anywhere: Checkpoint, disturb: Disturb
) -> list[Tensor | None]:
    (x, h), box = inputs(), {"c": torch.randn(2, WIDTH)}
    mask = torch.randn(2, WIDTH)
    y = anywhere(lambda h, box, *, mask: (h * box["c"]).sin() * mask, h, box, mask=mask)
    disturb(lambda: double(box["c"], mask))
    if not lives:
        del mask
        box.clear()
    y.sum().backward()
    return [x.grad]


@right
def test_recomputation_gives_other_values(anywhere: Checkpoint, disturb: Disturb) -> list[Tensor | None]:
    (x, h), state = inputs(), {"scale": 1.0}
    y = anywhere(lambda h: (h * state["scale"]).sin().exp(), h)
    disturb(lambda: state.update(scale=2.0))
    y.sum().backward()
    return [x.grad]


@right
def test_recomputation_saves_more(anywhere: Checkpoint, disturb: Disturb) -> list[Tensor | None]:
    (x, h), state = inputs(), {"depth": 2}

    def fn(h: Tensor) -> Tensor:
        for _ in range(state["depth"]):
            h = h.sin()
        return h.exp()

    y = anywhere(fn, h)
    disturb(lambda: state.update(depth=3))
    y.sum().backward()
    return [x.grad]


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


@as_without_checkpointing
def test_a_buffer_that_forward_reads_and_updates(anywhere: Checkpoint) -> list[Tensor | None]:
    module, (x, h) = Average(), inputs()
    anywhere(module, anywhere(module, h)).sum().backward()
    return [x.grad, *(p.grad for p in module.parameters()), module.mean]


@pytest.mark.parametrize("change", [lambda block: block.eval(), lambda block: setattr(block, "scale", 3.0)])
@as_without_checkpointing
def test_an_attribute_or_flag_changes_between_two_live_forwards(
    change: Callable[[Block], object], anywhere: Checkpoint
) -> list[Tensor | None]:
    block, (x, h) = Block(), inputs()
    first = anywhere(block, h)
    change(block)
    second = anywhere(block, h)
    (first + second).sum().backward()
    return [x.grad, *(p.grad for p in block.parameters())]


@pytest.mark.parametrize("source", ["random", "NumPy", "generator"])
@as_without_checkpointing
def test_draws_that_torch_does_not_preserve(source: str, anywhere: Checkpoint) -> list[Tensor | None]:
    (x, h), generator = inputs(), torch.Generator(DEVICE).manual_seed(3)
    draws: dict[str, Callable[[], Any]] = {
        "random": random.random,
        "NumPy": lambda: float(np.random.rand()),
        "generator": lambda: torch.rand(WIDTH, generator=generator),
    }
    anywhere(lambda h: (h * draws[source]()).sin(), h).sum().backward()
    return [x.grad]


@as_without_checkpointing
def test_batch_norm_counts_a_step_once(anywhere: Checkpoint) -> list[Tensor | None]:
    norm, (x, h) = nn.BatchNorm1d(WIDTH), inputs()
    anywhere(lambda h: norm(h).sin(), h).sum().backward()
    if anywhere is not plainly:
        assert norm.num_batches_tracked is not None
        assert norm.num_batches_tracked.item() == 1
    return [x.grad, *(p.grad for p in norm.parameters()), *norm.buffers()]


def test_a_list_is_appended_to_once(anywhere: Checkpoint) -> None:
    x, _ = inputs()
    given: list[str] = []
    captured: list[str] = []

    def fn(x: Tensor, given: list[str]) -> Tensor:
        given.append("called")
        captured.append("called")
        return x.sin().exp() * len(given)

    anywhere(fn, x, given).sum().backward()
    assert given == captured == ["called"]
    assert torch.equal(grad_of(x), torch.autograd.grad((x.sin().exp() * 1).sum(), x)[0])


UNSEEN: dict[str, Callable[[Tensor], object]] = {
    ".data": lambda t: t.data.mul_(2),
    "NumPy or a kernel": lambda t: replace_unseen(t, 2),
}


@pytest.mark.parametrize("what", ["argument", "keyword", "captured", "parameter"])
@pytest.mark.parametrize("write", UNSEEN.values(), ids=UNSEEN)
@right_or_named
def test_a_write_that_no_version_counter_sees(
    write: Callable[[Tensor], object], what: str, anywhere: Checkpoint, disturb: Disturb
) -> list[Tensor | None]:
    block, (x, h) = Block(), inputs()
    argument, keyword, captured = (torch.randn(2, WIDTH) for _ in range(3))
    targets = {"argument": argument, "keyword": keyword, "captured": captured, "parameter": block.linear.weight}
    y = anywhere(lambda h, c, *, k: (block(h) * c).sin() * (k * captured).cos(), h, argument, k=keyword)
    disturb(lambda: write(targets[what]))
    y.sum().backward()
    return [x.grad, *(p.grad for p in block.parameters())]


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
@right_or_named
def test_routing_that_flips_on_recomputation(
    later: bool, anywhere: Checkpoint, disturb: Disturb
) -> list[Tensor | None]:
    experts, (x, h) = Experts(), inputs()
    y = anywhere(experts, h)
    if later:
        disturb(experts.bias.neg_)
    y.sum().backward()
    return [x.grad, *(p.grad for p in experts.parameters())]


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


@right_or_named
def test_a_branch_times_zero_with_stale_weights(anywhere: Checkpoint, disturb: Disturb) -> list[Tensor | None]:
    layer, (x, h) = LowRank(), inputs()
    y = anywhere(layer, h)
    disturb(lambda: layer.down.weight.data.mul_(2))
    y.sum().backward()
    return [x.grad, *(p.grad for p in layer.parameters())]


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("how", ["detach", "no_grad"])
@as_without_checkpointing
def test_an_attribute_that_toggles_gradients_between_two_live_forwards(
    how: str, frozen: bool, anywhere: Checkpoint
) -> list[Tensor | None]:
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

    module, (x, h) = Toggled(), inputs()
    first = anywhere(module, h)
    module.frozen = not frozen
    second = anywhere(module, h)
    (first + second * 3).sum().backward()
    return [x.grad, *(p.grad for p in module.parameters())]


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
@right_or_named
def test_weights_changed_by_a_fused_step(
    optimizer: type[torch.optim.SGD | torch.optim.AdamW], anywhere: Checkpoint, disturb: Disturb
) -> list[Tensor | None]:
    block, (x, h) = Block(), inputs()
    stepper = optimizer(block.parameters(), lr=0.5, fused=True)
    other = anywhere(block, h.detach())
    y = anywhere(block, h)
    other.sum().backward()
    earlier = [grad_of(p).clone() for p in block.parameters()]
    disturb(stepper.step)
    stepper.zero_grad()
    y.sum().backward()
    return [*earlier, x.grad, *(p.grad for p in block.parameters())]


@right_or_named
def test_a_boundary_whose_address_another_takes(anywhere: Checkpoint, disturb: Disturb) -> list[Tensor | None]:
    block, (x, h), mask = Block(), inputs(), torch.randn(2, WIDTH)
    y = anywhere(lambda h, *, mask: block(h * mask), h, mask=mask)
    del h, mask
    others = [torch.full((2, WIDTH), 7.0) for _ in range(64)]
    y.sum().backward()
    return [x.grad, *(p.grad for p in block.parameters()), others[0]]


@pytest.mark.parametrize("leaf", [False, True])
@pytest.mark.parametrize("apart", [False, True])
@as_without_checkpointing
def test_an_auxiliary_loss_kept_in_an_attribute(apart: bool, leaf: bool, anywhere: Checkpoint) -> list[Tensor | None]:
    class Auxiliary(Block):
        def forward(self, h: Tensor) -> Tensor:
            y = super().forward(h)
            self.loss = self.linear(y).square().mean()
            return y

    module, (x, h) = Auxiliary(), inputs()
    y = anywhere(module, x if leaf else h)
    if apart:
        y.sum().backward(retain_graph=True)
        module.loss.backward()
    else:
        (y.sum() + module.loss).backward()
    return [x.grad, *(p.grad for p in module.parameters())]


@right_or_named
def test_an_output_that_is_a_view_of_an_input_is_written_to(anywhere: Checkpoint) -> list[Tensor | None]:
    x, h = inputs()
    view, other = anywhere(lambda h: (h.view(-1), (h + 1).sin()), h)
    view.mul_(3)
    (view.sum() + h.sum() + other.sum()).backward()
    return [x.grad, view.detach()]


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
