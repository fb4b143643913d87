"""Puts the simulated device in CUDA's place in each process that imports torch, if SIMULATED_CUDA names its library."""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType


class _AfterTorch(importlib.abc.MetaPathFinder):
    """Runs device.py as soon as torch is imported, and leaves torch to be imported no earlier than without it."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        assert spec is not None
        assert spec.loader is not None
        loader, execute = spec.loader, spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            where = Path(__file__).parents[1] / "device.py"
            device = importlib.util.spec_from_file_location("simulated_cuda_device", where)
            assert device is not None
            assert device.loader is not None
            loaded = importlib.util.module_from_spec(device)
            sys.modules[device.name] = loaded
            device.loader.exec_module(loaded)

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if os.environ.get("SIMULATED_CUDA"):
    sys.meta_path.insert(0, _AfterTorch())
