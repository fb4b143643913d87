"""Custom autograd functions of every form, for tests of what runs by name. A worker imports this module by its name."""

import itertools
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from backhaul import register_adapter
from support.devices import DEVICE
from support.unseen import replace_unseen

SLOPE = 0.5
"""Read by a backward only."""

OFFSET = 1.0
"""Read by the backward of an op."""

SETTINGS = SimpleNamespace(slope=0.5)
"""Read by a backward only."""


class Scale(torch.autograd.Function):
    """Keeps a tensor and a number, and reads a number of its class in backward."""

    damping = 1.0

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.factor = factor
        return x * weight * factor

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        (gradient,) = gradients
        return gradient * weight * ctx.factor * Scale.damping, (gradient * x * ctx.factor).sum(0), None


class Hidden(torch.autograd.Function):
    """Keeps its tensors as attributes of the context, which saved-tensor hooks don't see, as bitsandbytes does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.tensors = (None, weight)
        ctx.x = x
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        _, weight = ctx.tensors
        return gradients[0] @ weight.t(), ctx.x.flatten(0, -2).t() @ gradients[0].flatten(0, -2)


class WithSetup(torch.autograd.Function):
    """Has its context set up by a function of its own, and two outputs of which one is an integer."""

    @staticmethod
    def forward(x: Tensor, power: int = 2) -> tuple[Tensor, Tensor]:
        return x**power, x.argmax(-1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, power = inputs
        ctx.save_for_backward(x)
        ctx.power = power
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return gradients[0] * ctx.power * x ** (ctx.power - 1), None


class InPlace(torch.autograd.Function):
    """Writes to its argument and returns it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        ctx.mark_dirty(x)
        return x.mul_(factor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * ctx.factor, None


class Once(torch.autograd.Function):
    """Has a backward that can't be differentiated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * ctx.saved_tensors[0].exp()


class NoGradient(torch.autograd.Function):
    """Has two inputs, and no gradient for one of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return x + y.detach().tanh()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * 2, None


class Unmaterialized(torch.autograd.Function):
    """Gets None for the output that has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        scaled = [gradient * factor for gradient, factor in zip(gradients, (2, 3), strict=True) if gradient is not None]
        return sum(scaled)


class Nested(torch.autograd.Function):
    """Calls another function in its forward and in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return Scale.apply(x, weight, 3.0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return Scale.apply(gradients[0], weight, 3.0), (gradients[0] * x * 3.0).sum(0)


class Dropped(torch.autograd.Function):
    """Draws random numbers in forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        ctx.mask = torch.rand_like(x) > p
        return x * ctx.mask

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * ctx.mask, None


class Noisy(torch.autograd.Function):
    """Draws random numbers in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * 2 + torch.randn_like(gradients[0])


class Differentiating(torch.autograd.Function):
    """Takes gradients inside its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            inner = x.detach().requires_grad_()
            value = (inner.sin() ** 2).sum()
        (gradient,) = torch.autograd.grad(value, inner)
        ctx.save_for_backward(gradient)
        return value.detach() + 0 * x.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * ctx.saved_tensors[0]


class Overwriting(torch.autograd.Function):
    """Overwrites the gradient that it gets, as kernels do to save memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0].mul_(2)


class ReadsModule(torch.autograd.Function):
    """Reads a number of its module in backward only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * SLOPE


class ReadsSettings(torch.autograd.Function):
    """Reads an attribute of an object of its module in backward only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * SETTINGS.slope


class DroppedInFork(torch.autograd.Function):
    """Draws random numbers in forward, and leaves the generator as it was."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            ctx.mask = torch.rand_like(x) > p
        return x * ctx.mask

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * ctx.mask, None


@dataclass(frozen=True)
class State:
    """An object with a tensor, as quantised weights have."""

    scale: Tensor
    bits: int
    name: str = "linear"


class Pair(NamedTuple):
    """A named tuple with a tensor."""

    left: Tensor
    right: float


class Dequantized(torch.autograd.Function):
    """Has objects among its arguments and keeps them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, state: State, pair: Pair, gains: tuple[float, ...]) -> Tensor:
        ctx.state, ctx.weight, ctx.pair, ctx.gains = state, weight, pair, gains
        return x @ (weight.to(x.dtype) * state.scale / 2**state.bits) + pair.left * pair.right * gains[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        weight = ctx.weight.to(gradients[0].dtype) * ctx.state.scale / 2**ctx.state.bits
        return gradients[0] @ weight.t(), None, None, None, None


@torch.library.custom_op("backhaul_tests::shifted", mutates_args=())
def shifted(x: Tensor, by: float) -> Tensor:
    """An op of a library, with a backward."""
    return x.sin() + by


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.by = inputs[1]


def _backward(ctx: Any, gradient: Tensor) -> Any:
    return gradient * ctx.saved_tensors[0].cos() * (OFFSET + ctx.by), None


shifted.register_autograd(_backward, setup_context=_setup)


COUNT = itertools.count()
"""Counts what no digest sees."""

TOTAL = torch.zeros((), device="cpu")
"""Written to by a function that does not get it as an argument."""


class Counting(torch.autograd.Function):
    """Returns something else each time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * next(COUNT)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * 2


class Remembering(torch.autograd.Function):
    """Returns the same each time, and has another backward each time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.number = next(COUNT)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * ctx.number


class Failing(torch.autograd.Function):
    """Raises an exception in forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.exp()
        raise KeyError("in forward")


class CountingBackward(torch.autograd.Function):
    """Counts its backwards, and multiplies by their number."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        CountingBackward.calls += 1
        return gradients[0] * CountingBackward.calls


class Casting(torch.autograd.Function):
    """Casts its arguments in an autocast region of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        with torch.autocast(DEVICE, torch.bfloat16):
            return (x @ weight).float()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return gradients[0].unsqueeze(-1) * weight, x.t() @ gradients[0]


class FailingBackward(torch.autograd.Function):
    """Raises an exception in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise KeyError("in backward")


class Accumulating(torch.autograd.Function):
    """Adds up what it sees."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        TOTAL.add_(x.sum().cpu())
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * 2


class Halved(Tensor):
    """A weight that is stored as bytes and half of whose scale is in another tensor, as quantised weights are."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        return ["codes", "scale"], {"kind": "halved"}

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> "Halved":
        assert context == {"kind": "halved"}
        return Halved(inner["codes"], inner["scale"])

    def dense(self) -> Tensor:
        """The plain tensor that it stands for."""
        return self.codes.to(torch.float32) * self.scale / 2

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, op: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        dense = [arg.dense() if isinstance(arg, Halved) else arg for arg in args]
        return op(*dense, **(kwargs or {}))


class Scales:
    """An object with an adapter of its own."""

    def __init__(self, values: Tensor, bits: int) -> None:
        self.values, self.bits = values, bits


register_adapter(
    "support.functions:Scales",
    flatten=lambda scales: (scales.values, scales.bits),
    build=lambda cls, parts: cls(*parts),
)


class Scaled(torch.autograd.Function):
    """Has an object with an adapter among its arguments."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scales: Scales) -> Tensor:
        ctx.scales = scales
        return x * scales.values * scales.bits

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * ctx.scales.values * ctx.scales.bits, None


class Kernel(torch.autograd.Function):
    """Has its gradient ready in forward and keeps it in the memory of its argument, as fused losses do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        loss = x.square().sum(-1)
        replace_unseen(x, 2)
        ctx.save_for_backward(x)
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0].unsqueeze(-1) * ctx.saved_tensors[0]
