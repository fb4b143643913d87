"""Ops that are nothing but a list of other ops."""

from functools import cache

import torch

from backhaul_runtime.torch_internals.private import OpOverload

_OWN_KERNELS = (
    *("Autograd", "AutogradCPU", "AutogradCUDA", "AutocastCPU", "AutocastCUDA", "CPU", "CUDA"),
    *("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional", "FuncTorchBatched"),
)


@cache
def is_composed(op: OpOverload) -> bool:
    """Whether a library has defined an op as a function of other ops, which run above autograd and autocast.

    torch's own ops are none of these: some of them change a tensor without an op, as `set_data` does.
    """
    name = op.name()  # type: ignore[no-untyped-call]
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    if op.namespace in ("aten", "prim", "prims"):
        return False
    return has(name, "CompositeImplicitAutograd") and not any(has(name, key) for key in _OWN_KERNELS)
