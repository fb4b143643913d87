"""What the trainer keeps of segments that a worker has, and what it computes again once the worker is gone."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backhaul import SegmentLostError, StaleTensorError
from backhaul._backward import lineage
from backhaul._backward.local_recompute import outputs_here
from backhaul_runtime.tensors.layout import layout_of
from conftest import RETURNS
from support.bits import Checkpoint, differing, grad_of, plainly
from support.loopback import Loopback

WIDTH = 8
Run = Callable[[Checkpoint, list[nn.Module], Tensor], Tensor]


def test_copies_of_unknown_content_are_shared_by_tensor_and_version() -> None:
    copies, tensor = lineage.Copies(), torch.zeros(4)
    layout = layout_of(tensor)
    first = copies.copy_of(tensor, layout, None)
    assert copies.copy_of(tensor.view(4), layout, None) is first
    second = copies.copy_of(tensor.add_(1), layout, None)
    assert (first.tolist(), second.tolist()) == ([0, 0, 0, 0], [1, 1, 1, 1])


def test_a_copy_is_not_taken_for_that_of_a_tensor_in_the_same_place() -> None:
    copies, held = lineage.Copies(), []
    for number in range(50):  # each likely where the one before was
        tensor = torch.full((4,), float(number))
        held.append(copies.copy_of(tensor, layout_of(tensor), None))
        del tensor
    assert [copy[0].item() for copy in held] == list(range(50))


def block() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.2))


def build(count: int = 4) -> tuple[list[nn.Module], Tensor]:
    torch.manual_seed(1)
    return [block() for _ in range(count)], torch.randn(4, WIDTH, requires_grad=True)


def gradients(checkpoint: Checkpoint, run: Run, lose: Callable[[], None] = lambda: None, count: int = 4) -> list[Any]:
    """Loss and all gradients; the worker is lost between forward and backward."""
    blocks, x = build(count)
    loss = run(checkpoint, blocks, x).square().mean()
    lose()
    loss.backward()
    return [loss.detach(), x.grad, *(p.grad for b in blocks for p in b.parameters())]


def after(step: Callable[[Tensor, Tensor], Tensor]) -> Run:
    """Segments in a row; given what went into one and what came out, `step` gives what goes into the next."""

    def run(checkpoint: Checkpoint, blocks: list[nn.Module], x: Tensor) -> Tensor:
        for block in blocks:
            x = step(x, checkpoint(block, x))
        return x

    return run


def shared(checkpoint: Checkpoint, blocks: list[nn.Module], x: Tensor) -> Tensor:
    """Two segments take one output, and one takes two."""
    h = checkpoint(blocks[0], x)
    a, b = checkpoint(blocks[1], h), checkpoint(blocks[2], h)
    return checkpoint(lambda a, b: blocks[3](a * b), a, b)


def state(checkpoint: Checkpoint, blocks: list[nn.Module], x: Tensor) -> Tensor:
    """Segments that hand on two tensors."""
    c = x * 2
    for block in blocks:
        x, c = checkpoint(lambda x, c, block=block: (block(x) + c, c * 0.5 + x), x, c)
    return x + c


def captured(checkpoint: Checkpoint, blocks: list[nn.Module], x: Tensor) -> Tensor:
    """A segment takes another's output by closure."""
    x = x.sin()
    for block in blocks:
        x = checkpoint(lambda block=block, x=x: block(x))
    return x


RETAINED_FIRST = {
    "chain": after(lambda x, y: y),
    "residual": after(lambda x, y: x + y),
    "residual, other way round": after(lambda x, y: torch.add(y, x, alpha=0.3)),
    "difference": after(lambda x, y: torch.sub(x, y, alpha=2)),
    "scaled": after(lambda x, y: x * 0.7 + y / 3),
    "negated": after(lambda x, y: -y * 2),
    "views": after(lambda x, y: y.view(2, 2, WIDTH).transpose(0, 1).flatten(0, 1)),
    "more views": after(lambda x, y: y.t().contiguous().permute(-1, 0).unsqueeze(0).squeeze(0)),
    "parts": after(lambda x, y: x + y[1:3].transpose(-1, -2)[..., -1].view(1, WIDTH)),
    "twice": after(lambda x, y: x + (y + y)),
    "shared": shared,
    "captured": captured,
}
RETAINED_EACH = {
    "norm": after(lambda x, y: nn.functional.layer_norm(y, [WIDTH])),
    "gate": after(lambda x, y: x * y),
    "number": after(lambda x, y: y + 1.0),
    "cast": after(lambda x, y: y.double().float()),
    "complex": after(lambda x, y: torch.view_as_real(torch.view_as_complex(y.view(4, 4, 2)) * 1j).flatten(1)),
    "overlapping": after(lambda x, y: y[:1].expand(4, WIDTH)),
    "in place": after(lambda x, y: y.mul_(2)),
}


each_way = pytest.mark.parametrize(
    ("returns", "is_lost"), [("gradients", True), ("gradients", False), ("activations", True)]
)


def retained(loopback: Loopback) -> list[int]:
    """How many copies each segment holds."""
    return [sum(s.is_copy and s.retained is not None for s in recording.sources) for recording in loopback.recordings]


def check_retained(loopback: Loopback, returns: str, is_lost: bool, run: Run, expected: list[int]) -> None:
    def lose() -> None:
        assert retained(loopback) == expected
        loopback.is_lost = is_lost

    ours = gradients(partial(loopback.checkpoint, returns=returns), run, lose)
    assert differing(ours, gradients(plainly, run)) == []


@each_way
@pytest.mark.parametrize("name", RETAINED_FIRST)
def test_only_the_first_boundary_is_kept(loopback: Loopback, returns: str, is_lost: bool, name: str) -> None:
    check_retained(loopback, returns, is_lost, RETAINED_FIRST[name], [1, 0, 0, 0])


@each_way
@pytest.mark.parametrize("name", RETAINED_EACH)
def test_what_the_graph_does_not_tell_is_kept(loopback: Loopback, returns: str, is_lost: bool, name: str) -> None:
    check_retained(loopback, returns, is_lost, RETAINED_EACH[name], [1, 1, 1, 1])


def inside(function: Callable[[nn.Module, Tensor], Tensor]) -> Run:
    """Segments in a row of a function that calls a block."""

    def run(checkpoint: Checkpoint, blocks: list[nn.Module], x: Tensor) -> Tensor:
        for block in blocks:
            x = checkpoint(partial(function, block), x)
        return x

    return run


def parts(checkpoint: Checkpoint, blocks: list[nn.Module], x: Tensor) -> Tensor:
    """Segments whose outputs share memory."""
    pair = x.chunk(2)
    for block in blocks:
        pair = checkpoint(lambda a, b, block=block: block(torch.cat([a, b])).chunk(2), *pair)
    return torch.cat(pair)


REBUILT = {
    "ends in an add": inside(lambda block, x: x + block(x)),
    "ends in a write": inside(lambda block, x: block(x).mul_(x).relu_()),
    "parts": parts,
}


@pytest.mark.parametrize("name", REBUILT)
def test_what_a_segment_with_an_inside_returns_is_rebuilt(loopback: Loopback, name: str) -> None:
    retained_first = [2, 0, 0, 0] if name == "parts" else [1, 0, 0, 0]
    check_retained(loopback, "activations", True, REBUILT[name], retained_first)


def counter(block: nn.Module, x: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    counted = torch.empty_like(c)
    counted.numpy()[:] = c.detach().numpy() + 1
    return block(x) + c, counted.requires_grad_()


def counted(checkpoint: Checkpoint, blocks: list[nn.Module], x: Tensor) -> Tensor:
    """Segments that hand on a tensor which no op wrote."""
    c = torch.zeros(WIDTH, requires_grad=True)
    for block in blocks:
        x, c = checkpoint(partial(counter, block), x, c)
    return x + c


NOT_REBUILT = {
    "drawn after the last save": (inside(lambda block, x: block(x) + torch.rand_like(x)), [1, 1, 1, 1]),
    "written by no op": (counted, [2, 2, 2, 2]),
}


@pytest.mark.parametrize("name", NOT_REBUILT)
def test_what_a_program_does_not_give_is_kept(loopback: Loopback, name: str) -> None:
    run, expected = NOT_REBUILT[name]
    check_retained(loopback, "activations", True, run, expected)


def test_a_tensor_of_an_inside_that_is_used_outside_is_kept(loopback: Loopback) -> None:
    leaked: list[Tensor] = []

    def leaking(block: nn.Module, x: Tensor) -> Tensor:
        leaked.append(x.sin())
        return block(leaked[-1])

    run = after(lambda x, y: y + leaked.pop())
    check_retained(
        loopback,
        "gradients",
        True,
        lambda checkpoint, blocks, x: run(lambda block, x: checkpoint(leaking, block, x), blocks, x),
        [1, 1, 1, 1],
    )


def test_what_two_backwards_need_is_there_for_both(loopback: Loopback) -> None:
    def run(checkpoint: Checkpoint, lose: Callable[[], None]) -> list[Tensor]:
        blocks, x = build()
        loss = after(lambda x, y: x + y)(checkpoint, blocks, x).square().mean()
        lose()
        wanted = [x, *(p for b in blocks for p in b.parameters())]
        return [*torch.autograd.grad(loss, wanted, retain_graph=True), *torch.autograd.grad(3 * loss, wanted)]

    ours = run(partial(loopback.checkpoint, returns="gradients"), lambda: setattr(loopback, "is_lost", True))
    assert differing(ours, run(plainly, lambda: None)) == []


def test_a_segment_whose_predecessor_ran_backward_before_is_still_rebuilt(loopback: Loopback) -> None:
    def run(checkpoint: Checkpoint, lose: Callable[[], None]) -> list[Tensor]:
        blocks, x = build(2)
        h = checkpoint(blocks[0], x)
        side, y = h.sum(), checkpoint(blocks[1], h)
        leaves = list(blocks[1].parameters())
        side.backward()
        del h, side
        lose()
        return [grad_of(x), *torch.autograd.grad(y.square().mean(), leaves)]

    ours = run(partial(loopback.checkpoint, returns="gradients"), lambda: setattr(loopback, "is_lost", True))
    assert differing(ours, run(plainly, lambda: None)) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["chain", "residual"])
def test_a_long_chain_is_rebuilt_in_small_steps(loopback: Loopback, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    count = 36  # two roots of it are 12
    held: list[int] = []

    def noted(*args: Any) -> dict[int, Tensor]:
        held.append(len(loopback.copies._tensors))
        return outputs_here(*args)

    def lose() -> None:
        assert sum(retained(loopback)) == 1
        loopback.recordings.clear()  # they go with their segments
        loopback.is_lost = True

    monkeypatch.setattr(lineage, "outputs_here", noted)
    ours = gradients(partial(loopback.checkpoint, returns="gradients"), RETAINED_FIRST[name], lose, count)
    assert differing(ours, gradients(plainly, RETAINED_FIRST[name], count=count)) == []
    assert len(held) < 2 * count
    assert max(held) <= 13


FETCHED = {
    "as it was": (lambda tensor: tensor, 0),
    "as a view": (lambda tensor: tensor.t().contiguous().t(), 0),
    "other numbers": (lambda tensor: tensor + 1, 3),
    "another shape": (lambda tensor: tensor[:1], 3),
    "another dtype": (lambda tensor: tensor.double(), 3),
    "nothing": (lambda tensor: None, 3),
}


@pytest.mark.parametrize("name", FETCHED)
def test_what_a_worker_still_has_is_used_if_it_is_what_it_was(
    loopback: Loopback, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    sent, expected_replays = FETCHED[name]
    replays: list[str] = []

    def noted(name: str, *args: Any) -> dict[int, Tensor]:
        replays.append(name)
        return outputs_here(name, *args)

    def lose() -> None:
        loopback.is_lost = True
        loopback.copies.fetch = lambda address: sent(loopback.given[address])

    monkeypatch.setattr(lineage, "outputs_here", noted)
    ours = gradients(partial(loopback.checkpoint, returns="gradients"), RETAINED_FIRST["residual"], lose)
    assert differing(ours, gradients(plainly, RETAINED_FIRST["residual"])) == []
    assert len(replays) == expected_replays


@pytest.mark.parametrize("durability", ["lineage", "host", "none"])
@pytest.mark.parametrize("returns", RETURNS)
def test_durability(loopback: Loopback, returns: str, durability: str) -> None:
    checkpoint = partial(loopback.checkpoint, returns=returns, durability=durability)
    expected = gradients(plainly, RETAINED_FIRST["residual"])
    assert differing(gradients(checkpoint, RETAINED_FIRST["residual"]), expected) == []

    def lose() -> None:
        assert sum(retained(loopback)[4:]) == {"host": 4, "none": 0}.get(durability, 1)
        loopback.is_lost = True

    if durability != "none":
        assert differing(gradients(checkpoint, RETAINED_FIRST["residual"], lose), expected) == []
        return
    with pytest.raises(SegmentLostError, match="is not kept anywhere") as caught:
        gradients(checkpoint, RETAINED_FIRST["residual"], lose)
    error = caught.value
    assert (error.segment, error.session) == ("Sequential", loopback.journal.session)
    assert re.fullmatch(r".*\.py:\d+", error.site)
    assert error.site in error.message


def test_a_segment_behind_one_of_which_nothing_is_kept_keeps_its_own(loopback: Loopback) -> None:
    def run(checkpoint: Checkpoint, blocks: list[nn.Module], x: Tensor) -> Tensor:
        return checkpoint(blocks[1], checkpoint(blocks[0], x, durability="none"))

    with pytest.raises(SegmentLostError):
        gradients(loopback.checkpoint, run, lambda: setattr(loopback, "is_lost", True), 2)
    assert retained(loopback) == [0, 1]


def test_what_no_worker_takes_is_kept(loopback: Loopback) -> None:
    loopback.is_lost = True
    checkpoint = partial(loopback.checkpoint, returns="gradients", durability="none")
    ours = gradients(checkpoint, RETAINED_FIRST["chain"])
    assert differing(ours, gradients(plainly, RETAINED_FIRST["chain"])) == []


def test_a_boundary_that_somebody_wrote_to_is_kept(loopback: Loopback) -> None:
    def run(checkpoint: Checkpoint, blocks: list[nn.Module], x: Tensor) -> Tensor:
        h = checkpoint(blocks[0], x)
        with torch.no_grad():
            h.mul_(2)
        return checkpoint(blocks[1], h)

    expected = gradients(plainly, run, count=2)
    ours = gradients(loopback.checkpoint, run, lambda: setattr(loopback, "is_lost", True), 2)
    assert retained(loopback) == [1, 1]
    assert differing(ours, expected) == []


def test_a_boundary_written_to_unseen_is_never_a_wrong_gradient(loopback: Loopback) -> None:
    def run(checkpoint: Checkpoint, blocks: list[nn.Module], x: Tensor) -> Tensor:
        h = checkpoint(blocks[0], x)
        h.data.mul_(2)
        return checkpoint(blocks[1], h)

    expected = gradients(plainly, run, count=2)
    assert differing(gradients(loopback.checkpoint, run, count=2), expected) == []
    with pytest.raises(SegmentLostError, match="differs from its value in forward"):
        gradients(loopback.checkpoint, run, lambda: setattr(loopback, "is_lost", True), 2)


def test_an_input_of_two_segments_is_kept_once_if_both_met_the_same(loopback: Loopback) -> None:
    blocks, x = build(3)
    y = loopback.checkpoint(blocks[0], x) + loopback.checkpoint(blocks[1], x)
    x.data.mul_(2)
    z = loopback.checkpoint(blocks[2], x)
    assert retained(loopback) == [1, 0, 1]
    del y, z


def test_a_weight_of_an_earlier_segment_that_changed_is_stale(loopback: Loopback) -> None:
    blocks, x = build(2)
    y = after(lambda x, y: y)(loopback.checkpoint, blocks, x)
    with torch.no_grad():
        blocks[0].get_parameter("1.weight").mul_(2)
    loopback.is_lost = True
    with pytest.raises(StaleTensorError):
        y.sum().backward()


def test_a_scalar_that_hooks_packed_is_not_asked_for(loopback: Loopback) -> None:
    unpacked: list[Tensor] = []

    def unpack(tensor: Tensor) -> Tensor:
        unpacked.append(tensor)
        return tensor

    blocks, x = build(2)
    h = loopback.checkpoint(blocks[0], x)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
        scaled = h * torch.tensor(0.5)
    loopback.checkpoint(blocks[1], scaled)
    assert unpacked == []
    assert retained(loopback) == [1, 1]


def test_a_scalar_in_a_graph_that_was_freed_is_not_read(loopback: Loopback) -> None:
    blocks, x = build(2)
    scaled = loopback.checkpoint(blocks[0], x) * 0.5
    scaled.sum().backward()
    loopback.checkpoint(blocks[1], scaled)
    assert retained(loopback) == [1, 1]
