"""Whole micro-batches on a GPU: the bits of the loop, and the state of the device's generator."""

import pytest

import backhaul
from backhaul._accumulate.whole_shares import WholeShares
from conftest import quiet
from support.bits import differing
from support.processes import WorkerProcess
from support.whole import most_remote, train, whole_in

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # torch.compile says what it ignores


@pytest.mark.usefixtures("fresh_compiler")
def test_the_trainer_runs_no_forward_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WholeShares, "first", lambda self: 4)
    with (
        WorkerProcess("--memory", "1GiB", "--device", "cuda") as worker,
        backhaul.connect(worker.address, settings=quiet(whole_recheck=1.0)) as session,
    ):
        assert differing(train(session, device="cuda"), train(None, device="cuda")) == []
        assert whole_in(session) == most_remote(3, 6, 4)
        assert sum(segment.rechecked for segment in session.report().segments) == whole_in(session)
