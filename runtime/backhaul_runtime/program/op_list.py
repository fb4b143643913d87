"""The list of ops that a program may hold. A call with any other op stays on the trainer.

`make ops` generates the list, `ops.txt`. It runs torch's module and op databases, the model families of `transformers`
and some further functions under the recorder, the databases also under vmap. So the list holds the ops that models call
above autograd: it has no backward ops, no ops that read files, no sparse or quantized ops, and no ops of other
libraries, which an operator may allow: see NOTE [Names]. Ops that read what they are given without checking it have a
rule in `unsafe_arguments`, or are left out.
"""

from functools import cache
from importlib.resources import files
from typing import Any

import torch

from backhaul_runtime.errors import ProgramError
from backhaul_runtime.program.custom.names import names
from backhaul_runtime.torch_internals.private import OpOverload


@cache
def allowed_ops() -> frozenset[str]:
    """Returns the names of the ops on the list, in the form "namespace.name.overload"."""
    lines = (files("backhaul_runtime.program") / "ops.txt").read_text().splitlines()
    return frozenset(line for line in lines if line and not line.startswith("#"))


@cache
def resolve(name: str) -> OpOverload:
    """Returns the op of that name. Raises ProgramError if it is not on the list or this build of torch lacks it."""
    if name not in allowed_ops() and name not in names.ops:
        raise ProgramError(f'the op "{name}" is not on the list of ops a worker runs', op=name)
    namespace, packet, overload = name.split(".")
    op: Any = getattr(torch.ops, namespace)
    for part in (packet, overload):
        op = getattr(op, part, None)
    if not isinstance(op, OpOverload):
        raise ProgramError(f'torch {torch.__version__} of this worker has no op "{name}"', op=name)
    return op
