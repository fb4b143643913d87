"""What a program can't carry stays on the trainer: the gradients of no checkpointing, or a named error."""

import random
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  torch's own name for it

from backhaul import CheckpointError, Decision, SavedTensorModifiedError, Session, StaleTensorError
from support.bits import Checkpoint, grad_of, plainly, seed_generators
from support.calls import WIDTH, as_without_checkpointing, inputs, same


class Rounded(torch.autograd.Function):
    """A straight-through estimator: what a program can't carry."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 0.5


class Opaque(Tensor):
    """A subclass without behaviour of its own, which counts as a plain tensor."""


class State:
    """What a function reads besides its arguments. It may change before backward."""

    scale = 1.0
    draws_first = False


INDICES = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6, 7, 0]])


def sparse(h: Tensor, w: Tensor) -> Tensor:
    matrix = torch.sparse_coo_tensor(INDICES, torch.arange(8.0) * State.scale * random.random(), (8, 8))
    return torch.sparse.mm(matrix, (h @ w).T)


def compressed(h: Tensor, w: Tensor) -> Tensor:
    matrix = torch.sparse_coo_tensor(INDICES, torch.arange(8.0) * State.scale, (8, 8)).to_sparse_csr()
    return matrix @ (h @ w).T


def of_a_subclass(h: Tensor, w: Tensor) -> Tensor:
    return (h @ w) * torch.full((8,), State.scale * random.random()).as_subclass(Opaque)


def nested(h: Tensor, w: Tensor) -> Tensor:
    rows = torch.nested.as_nested_tensor([(h @ w)[:1], (h @ w)[1:]], layout=torch.jagged)
    return (rows * State.scale).values()


def recurrent(h: Tensor, w: Tensor) -> Tensor:
    if State.draws_first:
        torch.rand(5)
    seed_generators(2)
    lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.5)
    return lstm(Rounded.apply(h * 4) @ w)[0]


def leaky(h: Tensor, w: Tensor) -> Tensor:
    if State.draws_first:
        torch.rand(5)
    return F.rrelu(Rounded.apply(h * 4) @ w, training=True)


@pytest.mark.parametrize("fn", [sparse, compressed, of_a_subclass, nested, recurrent, leaky])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
def test_what_has_no_digest_is_that_of_forward(fn: Any, checkpoint: Checkpoint, session: Session) -> None:
    """Whatever the function would read or draw if it were called again."""

    def case(checkpoint: Checkpoint) -> list[Tensor | None]:
        State.scale, State.draws_first = 1.0, False
        w, (x, h) = torch.randn(WIDTH, WIDTH, requires_grad=True), inputs()
        y = checkpoint(fn, h, w)
        State.scale, State.draws_first = 5.0, True
        torch.rand(2)
        y.as_subclass(Tensor).sin().sum().backward()
        return [grad_of(tensor).as_subclass(Tensor) for tensor in (x, w)]

    same(case, checkpoint)
    assert Decision.KEPT in session.report().segments[0].decisions


@as_without_checkpointing
def test_gradients_that_another_thread_adds_meanwhile_are_there(checkpoint: Checkpoint) -> list[Tensor | None]:
    w, (x, h) = torch.ones(WIDTH, requires_grad=True), inputs()

    class Waits(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            other = threading.Thread(target=lambda: (w * 10).sum().backward())
            other.start()
            other.join()
            return gradient

    checkpoint(lambda h: (Waits.apply(h).sin() * w).sin(), h).sum().backward()
    return [x.grad, w.grad]


class Box:
    """A container that pytree does not know."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def in_an_object(h: Tensor, linear: nn.Linear) -> Box:
    return Box(linear(h).sin().exp())


def in_an_attribute(h: Tensor, linear: Any) -> None:
    linear.kept = linear(h).sin().exp()


def in_a_list(h: Tensor, linear: nn.Linear, kept: list[Tensor]) -> int:
    kept.append(linear(h).sin().exp())
    return len(kept)


@pytest.mark.parametrize("way", ["object", "attribute", "list", "beside a result"])
def test_results_that_nobody_sees_returned(way: str, checkpoint: Checkpoint, session: Session) -> None:
    def case(checkpoint: Checkpoint) -> list[Tensor | None]:
        linear, (x, h) = nn.Linear(WIDTH, WIDTH), inputs()
        kept: list[Tensor] = []
        if way == "object":
            result = checkpoint(in_an_object, h, linear).tensor
        elif way == "attribute":
            checkpoint(in_an_attribute, h, linear)
            result = linear.kept
        elif way == "list":
            checkpoint(in_a_list, h, linear, kept)
            result = kept[0]
        else:
            result, box = checkpoint(lambda h: (linear(h).exp(), in_an_object(h, linear)), h)
            result = result + box.tensor
        result.sum().backward()
        return [x.grad, linear.weight.grad]

    same(case, checkpoint)
    assert session.report().fallbacks == 0
    assert session.report().remote == 1


@as_without_checkpointing
def test_an_argument_of_a_subclass(checkpoint: Checkpoint) -> list[Tensor | None]:
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()), torch.randn(2, WIDTH, requires_grad=True)
    checkpoint(model, (x * 1).as_subclass(Opaque)).sum().backward()
    return [grad_of(tensor).as_subclass(Tensor) for tensor in (x, *model.parameters())]


class Named(torch.autograd.Function):
    """Sets an attribute that nodes of autograd have as a method."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.name = ctx.frame = ctx.positions = "mine"
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


@pytest.mark.parametrize("where", ["inside", "last inside", "before", "captured"])
@as_without_checkpointing
def test_a_custom_function_that_names_itself(where: str, checkpoint: Checkpoint) -> list[Tensor | None]:
    x, h = inputs()
    captured = Named.apply(h) if where == "captured" else torch.ones(WIDTH)
    fn = {
        "inside": lambda h: Named.apply(h).sin(),
        "last inside": lambda h: Named.apply(h.sin()),
        "before": lambda h: h.sin(),
        "captured": lambda h: h.sin() * captured,
    }[where]
    checkpoint(fn, Named.apply(h) if where == "before" else h).sum().backward()
    return [x.grad]


@pytest.mark.parametrize("build", [nn.LazyBatchNorm1d, lambda: nn.LazyLinear(WIDTH)])
@as_without_checkpointing
def test_the_first_call_of_a_lazy_module(build: Any, checkpoint: Checkpoint) -> list[Tensor | None]:
    module = build()
    results: list[Tensor | None] = []
    for _ in range(3):
        x, h = inputs()
        checkpoint(module, h).square().sum().backward()
        results += [x.grad, *(p.grad.clone() for p in module.parameters()), *module.buffers()]
    return results


def test_an_op_that_fails_is_as_if_it_had_not_been_called(checkpoint: Checkpoint, session: Session) -> None:
    def case(checkpoint: Checkpoint) -> list[Tensor | None]:
        linear, (x, h) = nn.Linear(WIDTH, WIDTH), inputs()

        def fn(h: Tensor) -> Tensor:
            try:
                return F.dropout(h @ h)  # of the wrong shape, noticed after autograd has saved both
            except RuntimeError:
                return F.dropout(linear(h)).sin()

        checkpoint(fn, h).sum().backward()
        return [x.grad, linear.weight.grad]

    same(case, checkpoint)
    assert session.report().remote == 1


def test_weights_of_an_lstm_that_changed_are_an_error_on_the_trainer(checkpoint: Checkpoint) -> None:
    lstm, (_, h) = nn.LSTM(WIDTH, WIDTH, batch_first=True), inputs()
    y = checkpoint(lambda h: lstm(Rounded.apply(h))[0], h)
    for parameter in lstm.parameters():
        parameter.data.mul_(2)
    with pytest.raises((StaleTensorError, CheckpointError)):
        y.sum().backward()


@pytest.mark.parametrize("kind", [Tensor, Opaque])
def test_an_argument_without_gradient_counts_as_it_was(kind: type[Tensor], checkpoint: Checkpoint) -> None:
    w = torch.ones(2, requires_grad=True)
    h = torch.ones(2).as_subclass(kind)
    y = checkpoint(lambda h: h * w, h)
    h.mul_(3)
    y.sum().backward()
    assert torch.equal(grad_of(w), torch.ones(2))


@pytest.mark.parametrize("kind", [Tensor, Opaque])
def test_a_captured_tensor_that_changed_counts_as_it_was(kind: type[Tensor], checkpoint: Checkpoint) -> None:
    w = torch.ones(2, requires_grad=True)
    h = torch.ones(2).as_subclass(kind)
    y = checkpoint(lambda: h * w)
    h.mul_(3)
    y.sum().backward()
    assert torch.equal(grad_of(w), torch.ones(2))


def test_a_sparse_tensor_that_changed_is_an_error(checkpoint: Checkpoint) -> None:
    w = torch.ones(2, 2, requires_grad=True)
    matrix = torch.eye(2).to_sparse()
    y = checkpoint(lambda matrix: torch.sparse.mm(matrix, w), matrix)
    matrix.mul_(3)
    with pytest.raises(SavedTensorModifiedError):
        y.sum().backward()


@as_without_checkpointing
def test_writes_after_a_refusal_happen_once(checkpoint: Checkpoint) -> list[Tensor | None]:
    linear, (x, h) = nn.Linear(WIDTH, WIDTH), inputs()
    count, mask = torch.zeros(2), torch.ones(2, WIDTH)

    def fn(h: Tensor, mask: Tensor) -> Tensor:
        y = Rounded.apply(linear(h))
        count[0] += 1
        mask[:, 0] *= 0.5
        return y * mask

    checkpoint(fn, h, mask).sum().backward()
    return [x.grad, linear.weight.grad, count, mask]


@as_without_checkpointing
def test_gradients_accumulated_inside_count_once(checkpoint: Checkpoint) -> list[Tensor | None]:
    linear, (x, h) = nn.Linear(WIDTH, WIDTH), inputs()

    def fn(h: Tensor) -> Tensor:
        linear(h.detach()).square().sum().backward()
        return Rounded.apply(linear(h).sin())

    checkpoint(fn, h).sum().backward()
    return [x.grad, linear.weight.grad]


@as_without_checkpointing
def test_gradients_accumulated_inside_into_an_argument_count_once(checkpoint: Checkpoint) -> list[Tensor | None]:
    x = torch.randn(4, WIDTH, requires_grad=True)

    def fn(x: Tensor) -> Tensor:
        (x * 3).square().sum().backward()
        return Rounded.apply(x.sin()).exp()

    checkpoint(fn, x).sum().backward()
    return [x.grad]


@as_without_checkpointing
def test_nested_tensors_run_here(checkpoint: Checkpoint) -> list[Tensor | None]:
    linear = nn.Linear(WIDTH, WIDTH)
    parts = [torch.randn(n, WIDTH, requires_grad=True) for n in (2, 3)]
    nested = torch.nested.as_nested_tensor(parts, layout=torch.jagged)
    checkpoint(lambda nested: linear(nested).sin(), nested).values().sum().backward()
    return [linear.weight.grad, *(part.grad for part in parts)]


def test_a_custom_function_that_no_output_shows(checkpoint: Checkpoint) -> None:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return 2 * gradient * ctx.saved_tensors[0]

    def case(checkpoint: Checkpoint) -> list[Tensor | None]:
        linear, (x, h) = nn.Linear(WIDTH, WIDTH), inputs()
        kept: list[Tensor] = []

        def fn(h: Tensor) -> Tensor:
            y = linear(h)
            kept.append(Square.apply(y).mean())
            return y

        (checkpoint(fn, h).sin().sum() + kept[0]).backward()
        return [x.grad, linear.weight.grad]

    same(case, checkpoint)


@as_without_checkpointing
def test_arguments_that_share_memory_of_which_one_is_written(checkpoint: Checkpoint) -> list[Tensor | None]:
    x, h = inputs()
    c = torch.randn(2, WIDTH)

    def fn(h: Tensor, c: Tensor, v: Tensor, again: Tensor) -> Tensor:
        assert c is again
        a = h + c
        v.mul_(2)
        return (a * (h + c)).sin()

    checkpoint(fn, h, c, c.view(-1), c).sum().backward()
    return [x.grad, c]


@as_without_checkpointing
def test_a_segment_inside_one_that_runs_here(checkpoint: Checkpoint, session: Session) -> list[Tensor | None]:
    linear, (x, h) = nn.Linear(WIDTH, WIDTH), inputs()

    def fn(h: Tensor) -> Tensor:
        inner = plainly if checkpoint is plainly else session.checkpoint
        return inner(lambda h: linear(h).sin(), Rounded.apply(h)) * F.relu(h)

    checkpoint(fn, h).sum().backward()
    return [x.grad, linear.weight.grad]


@as_without_checkpointing
def test_a_leaf_that_only_the_refused_op_uses(checkpoint: Checkpoint) -> list[Tensor | None]:
    x, h = inputs()
    w = torch.randn(WIDTH, requires_grad=True)

    def fn(h: Tensor) -> Tensor:
        (doubled,) = torch._foreach_mul([w], 2.0)  # on no list
        doubled.square().sum().backward()
        return h * doubled.detach()

    checkpoint(fn, h).sum().backward()
    return [x.grad, w.grad]


@pytest.mark.parametrize("leaf", [True, False])
@as_without_checkpointing
def test_a_backward_inside_adds_to_an_argument_once(leaf: bool, checkpoint: Checkpoint) -> list[Tensor | None]:
    x, h = inputs()

    def fn(h: Tensor) -> Tensor:
        h.sin().sum().backward(retain_graph=True)
        return Rounded.apply(h.exp()) * h

    checkpoint(fn, x if leaf else h).sum().backward()
    return [x.grad]


@pytest.mark.parametrize("hook", ["register_hook", "register_post_accumulate_grad_hook"])
@as_without_checkpointing
def test_a_hook_that_the_function_registers_is_there_once(hook: str, checkpoint: Checkpoint) -> list[Tensor | None]:
    linear, (x, _) = nn.Linear(WIDTH, WIDTH), inputs()

    def halve(leaf: Tensor) -> None:
        assert leaf.grad is not None
        leaf.grad.mul_(0.5)

    def fn(h: Tensor) -> Tensor:
        for leaf in (linear.weight, h):
            getattr(leaf, hook)(halve if "post" in hook else lambda gradient: gradient * 0.5)
        return linear(h).exp()

    checkpoint(fn, x).sum().backward()
    return [x.grad, linear.weight.grad]


@pytest.mark.parametrize("create_graph", [True, False])
@as_without_checkpointing
def test_a_gradient_inside_through_a_custom_function_that_saves_nothing(
    create_graph: bool, checkpoint: Checkpoint
) -> list[Tensor | None]:
    x, h = inputs()

    def fn(h: Tensor) -> Tensor:
        y = Rounded.apply(h * h * 3).sin()
        (gradient,) = torch.autograd.grad(y.sum(), h, create_graph=create_graph)
        return h.sin() * gradient

    checkpoint(fn, h).sum().backward()
    return [x.grad]


def test_a_gradient_inside_over_what_was_written_to_is_an_error(checkpoint: Checkpoint) -> None:
    def fn(x: Tensor) -> Tensor:
        h = Rounded.apply(x * x) * 1
        y = h.sin()
        with torch.no_grad():
            h.mul_(2)
        return x + torch.autograd.grad(y.sum(), x)[0]

    for call in (plainly, checkpoint):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            call(fn, inputs()[0])
