"""Every function of torch's own database, replayed bit by bit: hidden writes, draws and saves show here."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db

from support.bits import differing, outcome, plainly
from support.loopback import Loopback

SAMPLES = 4


OPS = [info for info in op_db if info.supports_autograd]
CHUNKS = 16
"""The database is one test, divided so that processes can share it."""


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(CHUNKS))
@pytest.mark.filterwarnings("ignore")
def test_every_op_of_torchs_database(chunk: int, subtests: pytest.Subtests) -> None:
    for info in OPS[chunk::CHUNKS]:
        with subtests.test(f"{info.name}.{info.variant_test_name}"):
            check(info)


def check(info: Any) -> None:
    dtype = next((d for d in (torch.float32, torch.float64, torch.complex64) if d in info.dtypes), None)
    if dtype is None:
        return
    torch.manual_seed(0)
    loopback = Loopback()
    # In a thread, whose stack is short: torch's database looks through all of pytest's for each sample.
    with ThreadPoolExecutor(1) as pool:
        samples = pool.submit(lambda: list(info.sample_inputs("cpu", dtype, requires_grad=True))[:SAMPLES]).result()
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
    assert loopback.report().fallbacks == 0
    assert loopback.changed() == []
