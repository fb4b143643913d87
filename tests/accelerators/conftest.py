"""Tests that need a CUDA device: a GPU, or the one that `make test-simulated-gpu` simulates. Elsewhere they skip."""

import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

IS_SIMULATED = bool(os.environ.get("SIMULATED_CUDA"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips the tests of this folder where there is no device."""
    if not torch.cuda.is_available():
        for item in items:
            if "tests/accelerators" in item.path.as_posix():
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device: see `make test-simulated-gpu`"))


@pytest.fixture
def simulation() -> Iterator[Any]:
    """The simulated device's settings and counters, the latter at zero. Skips the test on a real device."""
    if not IS_SIMULATED:
        pytest.skip("counts what only the simulated device counts")
    native = sys.modules["simulated_cuda_device"].native
    torch.cuda.synchronize()
    native.reset_counters()
    yield native
    native.settings(lazy=True, delay_us=(0, 0), poison=True, where=True, sync_debug=0)
    torch.cuda.synchronize()
