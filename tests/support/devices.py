"""The device of the tests that can run on any: `TEST_DEVICE=cuda` lets them run on a GPU, or on the simulated one."""

import os

import pytest

DEVICE = os.environ.get("TEST_DEVICE", "cpu")
"""Where tests make tensors, and what the workers that they start compute on, unless they name a device."""
IS_SIMULATED = bool(os.environ.get("SIMULATED_CUDA"))
NO_SPARSE = "the simulated device has no sparse tensors"


def on_the_host(why_not: str) -> pytest.MarkDecorator:
    """Marks a test that means nothing on a GPU, or on the simulated one, and says why."""
    return pytest.mark.skipif(DEVICE != "cpu", reason=f"only on the host: {why_not}")
