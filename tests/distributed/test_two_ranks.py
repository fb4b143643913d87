"""Two processes of torchrun train as they do without Backhaul, bit by bit, and workers recompute for both."""

import pytest

from distributed.cases import CASES, ERRORS, SHARDED
from support.processes import WorkerProcess
from support.torchrun import Outcome, outcomes

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

LOCAL = {
    "tensor parallel": "tensor subclass DTensor, whose parts are on several ranks (tensor parallelism)",
    "collectives": "the collective c10d.allreduce_.default, in which the other ranks take part only once",
}
"""Cases in which some segments run on the trainer, with the reason."""
IN_BLOCKS = {
    "block": "the first reduction of a DistributedDataParallel model must see autograd's order",
    "block with collectives": "a custom function, a hook or a tensor subclass before the last segments may communicate",
}
"""Cases in which the backward of some micro-batches in a block is not deferred, with the reason."""


@pytest.fixture(scope="module")
def by_case(worker: WorkerProcess, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Outcome]]:
    """The outcome of each case on both ranks."""
    *errors, last = ERRORS
    names = ["one copy", *CASES, *errors, *SHARDED, last]
    return outcomes(2, [worker.address], tmp_path_factory.mktemp("ranks"), names, timeout_s=200)


@pytest.mark.parametrize("name", ["one copy", *CASES, *SHARDED])
def test_results_are_those_without_backhaul(name: str, by_case: dict[str, list[Outcome]]) -> None:
    for rank in by_case[name]:
        assert rank.error == ""
        assert rank.differing == []
        assert rank.count("gradients") > 0
        if "block" not in name:
            assert bool(rank.count("kept")) == bool(rank.count("trainer")) == (name in LOCAL)
        expected = LOCAL.get(name) or IN_BLOCKS.get(name)
        assert expected is None or any(expected in reason for reason in rank.reasons)


@pytest.mark.parametrize("name", ERRORS)
def test_what_a_block_cannot_do_is_an_error_on_every_rank(name: str, by_case: dict[str, list[Outcome]]) -> None:
    for rank in by_case[name]:
        assert rank.error.startswith("AccumulationError: ")
        assert ERRORS[name][1] in rank.error
