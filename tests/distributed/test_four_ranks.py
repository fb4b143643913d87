"""Four processes of torchrun, in more combinations than every commit needs, and with workers that end."""

from pathlib import Path

import pytest

from distributed.cases import CASES, KEEPING, MORE, MORE_SHARDED, SHARDED
from distributed.workers import DRAINED, KILLED
from support.processes import WorkerProcess
from support.torchrun import Outcome, outcomes

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]

SAVED = [f"{name}: activations" for name in ("ddp", "block", "collectives", "1f1b")]
SAVED_SHARDED = [f"{name}: activations" for name in ("fsdp", "fsdp in bfloat16", "fsdp 1", "fsdp in a mesh", *KEEPING)]
NAMES = [*CASES, *MORE, *SAVED, *SHARDED, *MORE_SHARDED, *SAVED_SHARDED]


@pytest.fixture(scope="module")
def by_case(worker: WorkerProcess, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Outcome]]:
    """The outcome of each case on each rank. Two ranks have another worker first in their lists."""
    with WorkerProcess("--memory", "1GiB") as other:
        workers = [worker.address, worker.address, f"{other.address},{worker.address}", other.address]
        return outcomes(4, workers, tmp_path_factory.mktemp("ranks"), NAMES, timeout_s=500)


@pytest.mark.parametrize("name", NAMES)
def test_results_are_those_without_backhaul(name: str, by_case: dict[str, list[Outcome]]) -> None:
    for rank in by_case[name]:
        assert rank.error == ""
        assert rank.differing == []
        assert rank.count("activations" if name.endswith(": activations") else "gradients") > 0


def test_a_worker_is_killed_and_another_one_drained(worker: WorkerProcess, tmp_path: Path) -> None:
    with (
        WorkerProcess("--memory", "1GiB", supervised=True) as killed,
        WorkerProcess("--memory", "1GiB", supervised=True) as drained,
    ):
        ends = {KILLED: f"{killed.process.pid},{killed.pid}", DRAINED: str(drained.process.pid)}
        workers = ",".join([killed.address, drained.address, worker.address])
        (ranks,) = outcomes(4, [workers], tmp_path, ["workers that end"], timeout_s=200, environment=ends).values()
    for rank in ranks:
        assert rank.error == ""
        assert rank.differing == []
        assert rank.count("gradients") >= 6
        assert rank.count("trainer") > 0
