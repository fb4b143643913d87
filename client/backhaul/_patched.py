"""torch.utils.checkpoint.checkpoint replaced for a while, for code one can't edit."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch.utils.checkpoint


@contextmanager
def patched(checkpoint: Callable[..., Any]) -> Iterator[None]:
    """Replaces torch's function in every loaded module that has it as a global, under whatever name.

    torch's own module is not enough: Transformers, like torch's CheckpointWrapper, imports the function by name. Code
    that took it before and keeps it elsewhere, in a `functools.partial` say, is not reached; code that takes it now and
    keeps it gets torch's again afterwards. Takes some 20 ms at each end, so enter it around a loop, not in it.
    """
    before = torch.utils.checkpoint.checkpoint
    active = True

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        return (checkpoint if active else before)(*args, **kwargs)

    _replace(before, stand_in)
    try:
        yield
    finally:
        active = False
        _replace(stand_in, before)


def _replace(old: Callable[..., Any], new: Callable[..., Any]) -> None:
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType):
            for name, value in list(vars(module).items()):
                if value is old:
                    setattr(module, name, new)
