"""Segments that call the functions of `support.functions`, and what must be equal of them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from support.bits import Checkpoint, seed_generators
from support.devices import DEVICE
from support.functions import (
    Casting,
    Dequantized,
    Differentiating,
    Dropped,
    Halved,
    Hidden,
    InPlace,
    Kernel,
    Nested,
    NoGradient,
    Noisy,
    Once,
    Overwriting,
    Pair,
    ReadsModule,
    Scale,
    Scaled,
    Scales,
    State,
    Unmaterialized,
    WithSetup,
    shifted,
)

WIDTH = 8
Body = Callable[[Tensor, Tensor], Tensor]


def _hidden(h: Tensor, w: Tensor) -> Tensor:
    return Hidden.apply(h.sin().view(2, 2, WIDTH), w.outer(w)).tanh()


def _with_setup(h: Tensor, w: Tensor) -> Tensor:
    powers, places = WithSetup.apply(h.sin())
    return powers * w + places.unsqueeze(-1)


def _in_place(h: Tensor, w: Tensor) -> Tensor:
    product = h * w
    return InPlace.apply(product, 3.0).sin() + product


def _in_place_on_the_argument(h: Tensor, w: Tensor) -> Tensor:
    return InPlace.apply(h, 3.0).sin() * w


def _dropped(h: Tensor, w: Tensor) -> Tensor:
    before = torch.nn.functional.dropout(h * w, 0.3)
    return torch.nn.functional.dropout(Dropped.apply(before, 0.5), 0.2)


def _with_objects(h: Tensor, w: Tensor) -> Tensor:
    weight = torch.arange(WIDTH * WIDTH, dtype=torch.uint8).view(WIDTH, WIDTH)
    state, pair = State(torch.full((WIDTH,), 0.5), 4), Pair(torch.full((WIDTH,), 0.25), 2.0)
    return Dequantized.apply(h.sin() * w, weight, state, pair, (2.0,)).sin()


def _twice(h: Tensor, w: Tensor) -> Tensor:
    return Scale.apply(Scale.apply(h, w, 2.0).sin(), w, 0.5) * w


def _same_twice(h: Tensor, w: Tensor) -> Tensor:
    square = w.outer(w).sin()
    return h @ Hidden.apply(square, square) + h @ square


def _both_outputs(h: Tensor, w: Tensor) -> Tensor:
    first, second = Unmaterialized.apply(h * w)
    return first.sin() * second + second


def _subclass(h: Tensor, w: Tensor) -> Tensor:
    weight = Halved(torch.arange(WIDTH * WIDTH, dtype=torch.uint8).view(WIDTH, WIDTH), torch.full((WIDTH, 1), 0.5))
    return torch.nn.functional.linear(h * w, weight).sin()


def _autocast(h: Tensor, w: Tensor) -> Tensor:
    with torch.autocast(DEVICE, torch.bfloat16):
        square = w.outer(w)
        return (Hidden.apply(h.unsqueeze(0) @ square, square.bfloat16()) @ square).float()


def _region_inside(h: Tensor, w: Tensor) -> Tensor:
    first = Casting.apply(h.sin(), w)
    with torch.autocast(DEVICE, torch.bfloat16):
        second = h @ w  # with a cast of its own, as that of the function is gone
    return (first * second.float()).unsqueeze(-1) * h


REMOTE: dict[str, Body] = {
    "saves a tensor and a number": lambda h, w: Scale.apply(h.sin(), w, 2.5).tanh(),
    "is what the segment returns": lambda h, w: Scale.apply(h.sin(), w, 2.5),
    "is called twice": _twice,
    "keeps tensors on its context": _hidden,
    "has setup_context and an integer output": _with_setup,
    "writes to its argument": _in_place,
    "writes to an argument of the segment": _in_place_on_the_argument,
    "is once_differentiable": lambda h, w: Once.apply(h * w),
    "has no gradient for an input": lambda h, w: NoGradient.apply(h * w, w).sin(),
    "gets None as a gradient": lambda h, w: Unmaterialized.apply(h * w)[1].sin(),
    "gets one tensor twice": _same_twice,
    "has two outputs that are used": _both_outputs,
    "calls another function": lambda h, w: Nested.apply(h.sin(), w).cos(),
    "draws in forward": _dropped,
    "overwrites its gradient": lambda h, w: Overwriting.apply(h.sin() * w) * 2,
    "reads a number of its module": lambda h, w: ReadsModule.apply(h.sin() * w) * 2,
    "has objects among its arguments": _with_objects,
    "has an object with an adapter": lambda h, w: Scaled.apply(h * w, Scales(torch.full((WIDTH,), 0.5), 3)).sin(),
    "is torch's own, of a tensor subclass": _subclass,
    "writes by a kernel outside torch": lambda h, w: Kernel.apply(h.sin() * w) * 2,
    "is an op of a library": lambda h, w: shifted(h * w, 0.5).sin(),
    "runs under autocast": _autocast,
    "has an autocast region inside": _region_inside,
}
"""Functions that a worker can run exactly, by what is special about them."""

TRAINERS: dict[str, tuple[Body, str]] = {
    "draws in backward": (lambda h, w: Noisy.apply(h.sin() * w).cos(), "draws random numbers"),
    "takes gradients in forward": (lambda h, w: Differentiating.apply(h.sin() * w) * h.cos(), "takes gradients"),
}
"""Functions that only the trainer can run exactly, with a part of the reason that is given."""


def trained(body: Body, checkpoint: Checkpoint, steps: int = 2) -> list[Tensor | None]:
    """Returns outputs, gradients and the generator's state of some steps in which a segment calls a function."""
    seed_generators(3)
    results: list[Tensor | None] = []
    w = torch.randn(WIDTH, requires_grad=True)
    for _ in range(steps):
        x = torch.randn(4, WIDTH, requires_grad=True)
        y = checkpoint(lambda h: body(h, w), x * 1.0)
        y.square().sum().backward()
        results += [y.detach().clone(), x.grad, None if w.grad is None else w.grad.clone(), torch.get_rng_state()]
    return results


def checkpointing(session: Any, **options: Any) -> Checkpoint:
    """Returns a function that checkpoints on a session with these options."""
    return lambda function, *args: session.checkpoint(function, *args, **options)
