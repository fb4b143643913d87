"""Every function of torch's own database, replayed bit by bit: hidden writes, draws and saves show here."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from support.bits import differing, outcome, plainly, seed_generators
from support.loopback import Loopback

SAMPLES = [2, pytest.param(4, marks=pytest.mark.nightly)]
"""The most samples of an op that are compared."""
NOT_COMPARED = {
    "torch.ops.aten._flash_attention_forward.": "needs CUDA",
    "torch.ops.aten._efficient_attention_forward.": "needs CUDA",
    "nn.functional.batch_norm.without_cudnn": "needs CUDA",
    "nn.functional.one_hot.": "takes integers alone, which have no gradient",
    "to_sparse.": "its output is sparse, and torch cannot make a sparse tensor of ones",
}
"""Ops of which no sample is compared, and why. All others must have one that is."""

CHUNKS = 16
"""The database is one test, divided so that processes can share it."""


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(CHUNKS))
@pytest.mark.parametrize("most", SAMPLES)
@pytest.mark.filterwarnings("ignore")
def test_every_op_of_torchs_database(chunk: int, most: int, subtests: pytest.Subtests) -> None:
    from torch.testing._internal.common_methods_invocations import (
        op_db,
    )  # takes a second in a process that only collects

    for info in [info for info in op_db if info.supports_autograd][chunk::CHUNKS]:
        name = f"{info.name}.{info.variant_test_name}"
        with subtests.test(name):
            assert (check(info, most) == 0) == (name in NOT_COMPARED)


def check(info: Any, most: int) -> int:
    """Compares samples of an op, and returns how many."""
    dtype = next((d for d in (torch.float32, torch.float64, torch.complex64) if d in info.dtypes), None)
    if dtype is None:
        return 0
    seed_generators(0)
    loopback = Loopback()
    compared = 0
    # In a thread, whose stack is short: torch's database looks through all of pytest's for each sample.
    with ThreadPoolExecutor(1) as pool:
        samples = pool.submit(lambda: list(info.sample_inputs("cpu", dtype, requires_grad=True))[:most]).result()
    for sample in samples:
        args = (sample.input, *sample.args)
        if info.name == "linalg.lstsq" and sample.kwargs.get("driver", "gelsy") == "gelsy":
            continue  # torch leaves LAPACK's pivots as the memory was: other bits from call to call
        try:
            expected = outcome(plainly, info.op, args, sample.kwargs)
            again = outcome(plainly, info.op, args, sample.kwargs)
        except Exception:
            continue
        if differing(again, expected):
            continue  # undefined results, such as those of empty()
        assert differing(outcome(loopback.checkpoint, info.op, args, sample.kwargs), expected) == []
        compared += 1
    assert loopback.report().fallbacks == 0
    assert loopback.changed() == []
    return compared
