"""Tests that need a CUDA device: a GPU, or the one that `make test-simulated-gpu` simulates. Elsewhere they skip."""

import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic ops need it, in workers too
IS_SIMULATED = bool(os.environ.get("SIMULATED_CUDA"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips the tests of this folder where there is no device."""
    if not torch.cuda.is_available():
        for item in items:
            if "tests/accelerators" in item.path.as_posix():
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device: see `make test-simulated-gpu`"))


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Makes ops give the same bits in each run: without it plain training on a GPU does not reproduce its gradients.

    Memory that nothing writes stays undefined, so that a comparison of its bytes shows.
    """
    torch.use_deterministic_algorithms(True)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def simulation() -> Iterator[Any]:
    """The simulated device's settings and counters, the latter at zero. Skips the test on a real device."""
    if not IS_SIMULATED:
        pytest.skip("counts what only the simulated device counts")
    native = sys.modules["simulated_cuda_device"].native
    torch.cuda.synchronize()
    native.reset_counters()
    yield native
    native.settings(lazy=True, delay_us=(0, 0), poison=True, where=True, sync_debug=0, kernel_us=0)
    torch.cuda.synchronize()
