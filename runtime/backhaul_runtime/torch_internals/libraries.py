"""Which ops libraries have registered with torch, and which of their modules did so."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS

from backhaul_runtime.torch_internals.private import OpOverload, arguments_of


def registered_ops() -> frozenset[str]:
    """Returns the names of all ops of this process, in the form "namespace::name.overload", without ".default"."""
    return frozenset(torch._C._dispatch_get_all_op_names())


def module_of_op(qualified: str) -> str:
    """Returns the module that defined an op with `torch.library.custom_op`; empty for all other ops.

    Args:
        qualified: The name of the op, in the form "namespace::name".
    """
    made = OPDEFS.get(qualified)
    return "" if made is None else str(made._init_fn.__module__)


def defined_ops() -> frozenset[str]:
    """Returns the names of the ops that were defined with `torch.library.custom_op`, as "namespace::name"."""
    return frozenset(OPDEFS)


def overload_of(qualified: str) -> OpOverload:
    """Returns a registered op by its name in the form "namespace::name.overload"."""
    namespace, _, rest = qualified.partition("::")
    packet, _, overload = rest.partition(".")
    op: OpOverload = getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
    return op


def overload_of_custom_op(value: Any) -> OpOverload | None:
    """Returns the op of what `torch.library.custom_op` has returned; None for other values."""
    overload = getattr(value, "_opoverload", None)
    return overload if isinstance(overload, OpOverload) else None


def takes_text(op: OpOverload) -> bool:
    """Whether an op has an argument that is a text."""
    return any("str" in str(argument.type) for argument in arguments_of(op))


@contextmanager
def noting_libraries(is_torchs: Callable[[str], bool]) -> Iterator[dict[str, set[str]]]:
    """Notes, while it is open, which modules register ops from Python: their names by the namespace of the ops.

    Args:
        is_torchs: Whether a module, given by its name, only registers ops for others.
    """
    modules: dict[str, set[str]] = {}
    library_class: Any = torch.library.Library
    original = library_class.__init__

    def noting(library: Any, namespace: str, *args: Any, **kwargs: Any) -> None:
        frame: Any = sys._getframe(1)
        while frame is not None and is_torchs(str(frame.f_globals.get("__name__"))):
            frame = frame.f_back
        modules.setdefault(namespace, set()).add("" if frame is None else str(frame.f_globals.get("__name__")))
        original(library, namespace, *args, **kwargs)

    library_class.__init__ = noting
    try:
        yield modules
    finally:
        library_class.__init__ = original
