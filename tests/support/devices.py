"""The device of the tests that can run on any: `TEST_DEVICE=cuda` lets them run on a GPU, or on the simulated one."""

import os

DEVICE = os.environ.get("TEST_DEVICE", "cpu")
"""Where tests make tensors, and what the workers that they start compute on, unless they name a device."""
IS_SIMULATED = bool(os.environ.get("SIMULATED_CUDA"))
