"""Durations of a device's work: events that are read later, on a fake device whose streams and clock the test moves."""

import threading

import pytest
import torch

from backhaul_runtime.tensors.durations import DeviceSpan, DurationSum, known_s, wait_s
from backhaul_runtime.tensors.stopwatch import Stopwatch
from support.streams import FakeCuda

DEVICE = torch.device("cpu")  # of the host's tensors, which the fake device takes for its own


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda.installed(monkeypatch)


def queued(cuda: FakeCuda, work_ms: float) -> DeviceSpan:
    """A span of work that is queued and not done."""
    cuda.trainer.begin()
    stopwatch = Stopwatch(DEVICE)
    cuda.clock_ms += work_ms
    span = stopwatch.stop()
    assert isinstance(span, DeviceSpan)
    return span


def test_a_span_is_unknown_until_the_device_is_there_and_nothing_waits(cuda: FakeCuda) -> None:
    span = queued(cuda, 20.0)
    assert known_s(span) is None
    assert known_s(span, None, 0.5) == 0.5
    cuda.trainer.end()
    assert known_s(span, 0.5) == 0.02
    assert cuda.log == ["trainer is marked", "trainer is marked"]


def test_who_may_wait_gets_a_span_when_it_is_over(cuda: FakeCuda) -> None:
    span, got = queued(cuda, 20.0), list[float]()
    waiting = threading.Thread(target=lambda: got.append(wait_s(span)))
    waiting.start()
    cuda.trainer.end()
    waiting.join(60)
    assert got == [wait_s(span)] == [0.02]


def test_a_sum_takes_spans_in_when_they_are_over(cuda: FakeCuda) -> None:
    total = DurationSum()
    total.add(1.0)
    total.add(queued(cuda, 20.0), factor=3.0)
    assert (total.so_far_s, total.is_over) == (1.0, False)
    cuda.trainer.end()
    assert (total.so_far_s, total.is_over) == (1.06, True)
    assert total.wait() == 1.06
