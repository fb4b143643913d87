"""Hides packages that were built for CUDA and cannot be loaded beside a CPU build of torch, as pip installs them."""

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

_PACKAGES = ("torchvision", "torchaudio")


def hide_cuda_builds(*needed: str) -> list[str]:
    """Hides the packages that cannot be imported. Call it before the library that looks for them is imported.

    Args:
        needed: Packages that the library imports without using them on text. They are replaced by empty modules.

    Returns:
        The names of the packages that were hidden.
    """
    hidden = []
    for name in _PACKAGES:
        try:
            importlib.import_module(name)
        except (ImportError, OSError, RuntimeError):
            hidden.append(name)
            for module in [other for other in sys.modules if other.partition(".")[0] == name]:
                del sys.modules[module]
            sys.modules[name] = _empty(name) if name in needed else None  # type: ignore[assignment]
    return hidden


def _empty(name: str) -> ModuleType:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    return module
