"""Training with and without checkpointing, compared bit by bit."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

Checkpoint = Callable[..., Any]


def plainly(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Runs without checkpointing."""
    return function(*args, **kwargs)


def seed_generators(number: int) -> None:
    """torch.manual_seed for the devices that exist. For each kind that does not, torch keeps a text of the stack."""
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(number)


def grad_of(tensor: Tensor) -> Tensor:
    """The gradient of a tensor that must have one."""
    assert tensor.grad is not None
    return tensor.grad


def train(
    checkpoint: Checkpoint,
    build: Callable[[], nn.Module],
    run: Callable[[Checkpoint, nn.Module], tuple[Tensor, Sequence[Tensor]]],
    steps: int = 2,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
) -> list[Tensor | None]:
    """Everything that must be equal: losses, gradients of inputs and parameters, parameters and buffers, all steps.

    Args:
        checkpoint: Runs a function.
        build: Makes the model, seeded.
        run: Returns loss and differentiable inputs of a step.
        steps: How many.
        optimizer: Of the parameters; without one weights stay.
    """
    seed_generators(0)
    model = build()
    parameters = list(model.parameters())
    stepper = optimizer(parameters) if optimizer is not None and parameters else None
    results: list[Tensor | None] = []
    for _ in range(steps):
        loss, inputs = run(checkpoint, model)
        loss.backward()
        results.append(loss.detach().clone())
        results += [None if t.grad is None else t.grad.clone() for t in (*inputs, *parameters)]
        if stepper is not None:
            stepper.step()
            stepper.zero_grad()
        results += [buffer.clone() for buffer in model.buffers()]
    results.append(torch.get_rng_state())
    return results


def differing(ours: Sequence[Tensor | None], theirs: Sequence[Tensor | None]) -> list[int]:
    """Positions that are not equal bit by bit."""
    assert len(ours) == len(theirs)
    return [i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if not _equal(a, b)]


def same_bits(ours: Sequence[Tensor | None], theirs: Sequence[Tensor | None]) -> None:
    """Fails unless all are equal bit by bit."""
    assert differing(ours, theirs) == []


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    a, b = (t if t.layout is torch.strided else t.to_dense() for t in (a, b))
    if a.dtype is b.dtype is torch.complex32:  # torch can't compare these
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    # torch.equal says that NaN differs from itself
    return torch.equal(a, b) or (
        (a.dtype, a.shape) == (b.dtype, b.shape)
        and torch.equal(a.isnan(), b.isnan())
        and torch.equal(a.nan_to_num(), b.nan_to_num())
    )


def outcome(
    checkpoint: Checkpoint, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Tensor | None]:
    """Outputs, gradients, buffers and the generator's state of a call and its backward, on copies of the arguments."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    fresh = [_fresh(leaf) for leaf in leaves]
    args, kwargs = pytree.tree_unflatten([t * 1 if _takes_gradient(t) else t for t in fresh], spec)
    seed_generators(2)
    outputs = [leaf for leaf in pytree.tree_leaves(checkpoint(function, *args, **kwargs)) if isinstance(leaf, Tensor)]
    roots = [output for output in outputs if output.requires_grad]
    if roots:
        torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
    module = function if isinstance(function, nn.Module) else nn.Module()
    gradients = [t.grad for t in (*fresh, *module.parameters()) if isinstance(t, Tensor)]
    return [*(o.detach() for o in outputs), *gradients, *module.buffers(), torch.get_rng_state()]


def _fresh(leaf: Any) -> Any:
    return leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


def _takes_gradient(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad
