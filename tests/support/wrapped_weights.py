"""Weights that wrap tensors, as quantised weights of libraries do, and an op that a library composes of others."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  torch's own name for it

from support.compiled import WIDTH

_LIBRARY = torch.library.Library("backhaul_tests", "DEF")
_LIBRARY.define("scaled(Tensor values, Tensor scale, ScalarType dtype) -> Tensor")
_LIBRARY.impl("scaled", lambda values, scale, dtype: values.to(dtype) * scale.to(dtype), "CompositeImplicitAutograd")


class Quantised(Tensor):
    """Integers and their scales in the place of a matrix. `linear` computes with its values."""

    integers: Tensor
    scale: Tensor
    note: str

    @staticmethod
    def __new__(cls, values: Tensor, scale: Tensor, note: str, *, requires_grad: bool = False) -> "Quantised":
        made: Quantised = Tensor._make_wrapper_subclass(
            cls, values.shape, dtype=scale.dtype, device=values.device, requires_grad=requires_grad
        )
        made.integers, made.scale, made.note = values, scale, note
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Quantised({self.note})"  # torch's own would read values, which fake tensors do not have

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, str]]:
        return ["integers", "scale"], {"note": self.note}

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], attributes: dict[str, str], *_: Any) -> "Quantised":
        return cls(inner["integers"], inner["scale"], attributes["note"])

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if function is F.linear:
                x, weight, *rest = args
                y = x @ torch.ops.backhaul_tests.scaled(weight.integers, weight.scale, x.dtype).t()
                for bias in rest:
                    if bias is not None:
                        y += bias
                return y
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, op: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if op is torch.ops.aten.detach.default:
            (tensor,) = args
            return cls(tensor.integers, tensor.scale, tensor.note)
        plain = [arg.integers.to(arg.dtype) * arg.scale if isinstance(arg, Quantised) else arg for arg in args]
        return op(*plain, **(kwargs or {}))


def quantised(linear: nn.Linear) -> nn.Linear:
    """Gives a layer a frozen weight of integers."""
    weight = linear.weight.detach()
    scale = weight.abs().amax(1, keepdim=True) / 127
    wrapper = Quantised((weight / scale).round().to(torch.int8), scale, "int8")
    linear.weight = nn.Parameter(wrapper, requires_grad=False)
    return linear


class Adapted(nn.Module):
    """A frozen layer of integers with a trained adapter, as LoRA has it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = quantised(nn.Linear(WIDTH, WIDTH).requires_grad_(False))
        self.down = nn.Parameter(torch.randn(WIDTH, 2) / 4)
        self.up = nn.Parameter(torch.randn(2, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.base(x) + x @ self.down @ self.up)
