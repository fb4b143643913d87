"""Runs that are ended between two of their ops."""

import gc
import math
import weakref

import pytest
import torch

from backhaul import BackhaulError, DrainingError, ReplayError
from backhaul_runtime.program.program import Program
from backhaul_runtime.replay.replay import Replay
from backhaul_server.worker.engine import bounds
from backhaul_server.worker.engine.bounds import Bounds
from support.hostile import chain

NOTHING_SAVED = chain("aten.neg.default", 500, 16)
ALL_SAVED = chain("aten.sin.default", 500, 16)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    time = [0.0]
    monkeypatch.setattr(bounds, "monotonic", lambda: time[0])
    return time


def test_an_execution_has_a_deadline_and_the_next_one_another(now: list[float]) -> None:
    limited = Bounds(5.0)
    limited.begin(0)
    now[0] = 5.0
    limited.check()
    now[0] = 5.1
    with pytest.raises(ReplayError, match=r"ended after 5 s: make segments smaller, .* larger --execution-limit"):
        limited.check()
    limited.begin(0)
    limited.check()


def test_a_long_speculative_execution_ends_when_a_request_waits() -> None:
    waits = False
    ahead = Bounds(math.inf)
    ahead.begin(0, lambda: waits)
    ahead.check()
    waits = True
    with pytest.raises(ReplayError, match="requests wait"):
        ahead.check()
    ahead.begin(0)  # a requested run
    ahead.check()


def test_a_cancelled_segment_stays_cancelled() -> None:
    cancelled = Bounds(math.inf)
    cancelled.set(DrainingError("ended"))
    for _ in range(2):
        cancelled.begin(0)
        with pytest.raises(DrainingError):
            cancelled.check()


@pytest.mark.slow
def test_a_cancelled_execution_keeps_no_memory() -> None:
    cancelled = Bounds(math.inf)
    nodes_done = 0

    def cancel_later() -> bool:
        nonlocal nodes_done
        nodes_done += 1
        if nodes_done == 300:  # by now the graph has hooks that call the check
            cancelled.set(DrainingError("ended"))
        return False

    cancelled.begin(0, cancel_later)
    source = torch.ones(4)
    source_ref = weakref.ref(source)
    with pytest.raises(DrainingError) as caught:
        Replay(ALL_SAVED, [source], [], keep_saved=True, check=cancelled.check)
    del caught, source
    gc.collect()
    assert nodes_done == 300
    assert source_ref() is None


def test_forward_is_cancelled_between_its_ops() -> None:
    calls = 0

    def check() -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise DrainingError("enough")

    with pytest.raises(DrainingError):
        Replay(NOTHING_SAVED, [torch.ones(4)], [], keep_saved=False, check=check)
    assert calls == 3


@pytest.mark.parametrize("program", [NOTHING_SAVED, ALL_SAVED], ids=["nothing is saved", "all is saved"])
def test_backward_is_cancelled_between_its_ops_and_keeps_the_errors_name(program: Program) -> None:
    cancelled = False
    calls = 0

    def check() -> None:
        nonlocal calls
        calls += cancelled
        if calls == 3:
            raise DrainingError("enough")

    replay = Replay(program, [torch.ones(4)], [], keep_saved=False, check=check)
    cancelled = True
    with pytest.raises(BackhaulError) as caught:
        replay.backward({0: torch.ones(4)})
    assert isinstance(caught.value, DrainingError)


@pytest.mark.slow
def test_an_op_that_takes_far_more_memory_than_its_execution_fails_alone() -> None:
    memory = bounds.ExecutionMemory(64 << 20)
    most = memory.begin(1 << 20)
    x = torch.ones(1 << 10)
    with memory.limited(most, torch.get_num_threads()), pytest.raises(RuntimeError, match="memory"):
        x.repeat(1 << 20)
    assert x.repeat(1 << 16).sum() == 1 << 26  # 256 MiB, no longer limited
