"""Durations of work whose launches are quick: each kernel takes a second by the simulated device's clock."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from backhaul._config import resolve
from backhaul.doctor.profile.observed import ObservedSession
from backhaul_proto.v1.telemetry_pb2 import Lane
from conftest import QUIET
from support.processes import WorkerProcess

pytestmark = pytest.mark.slow

KERNELS = 3
"""The fewest kernels of a segment's forward, and of its backward."""
KERNEL_US = 1_000_000


@pytest.fixture(scope="module")
def slow_worker() -> Iterator[WorkerProcess]:
    slow = {"SIMULATED_CUDA_KERNEL_US": str(KERNEL_US)}
    with WorkerProcess("--memory", "1GiB", "--device", "cuda", environment=slow) as process:
        yield process


@pytest.fixture
def slow_session(simulation: Any, slow_worker: WorkerProcess) -> Iterator[ObservedSession]:
    with ObservedSession(resolve(QUIET, worker=slow_worker.address)) as session:
        simulation.settings(kernel_us=KERNEL_US)
        yield session


def segments(count: int) -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)).cuda() for _ in range(count)]


def test_forward_and_an_execution_last_as_long_as_their_devices_work(
    slow_session: ObservedSession, returns: str
) -> None:
    (segment,) = segments(1)
    for _ in range(2):
        x = torch.randn(4, 8, device="cuda", requires_grad=True)
        slow_session.checkpoint(segment, x, returns=returns, strict=True).sum().backward()
        slow_session.end_step()
    slow_session.close()
    lanes = {Lane.LANE_FORWARD, Lane.LANE_RECOMPUTE, *([Lane.LANE_BACKWARD] if returns == "gradients" else [])}
    for call in slow_session.calls:
        took_s = {span.lane: span.duration_s for span in call.spans}
        assert {lane for lane in lanes if took_s.get(lane, 0.0) < KERNELS} == set()


def test_a_recomputation_on_the_trainer_lasts_as_long_as_its_device_works(slow_session: ObservedSession) -> None:
    (segment,) = segments(1)
    x = torch.randn(4, 8, device="cuda", requires_grad=True)
    slow_session.checkpoint(segment, x, debug=True).sum().backward()
    slow_session.end_step()
    slow_session.close()
    ((took_s,),) = [[s.duration_s for s in call.spans if s.lane == Lane.LANE_TRAINER] for call in slow_session.calls]
    assert took_s >= KERNELS
    assert slow_session.report().segments[0].wait_s >= KERNELS


def test_shares_follow_from_what_devices_take(slow_session: ObservedSession, monkeypatch: pytest.MonkeyPatch) -> None:
    shares, layers = slow_session._shares["recompute"], segments(3)
    monkeypatch.setattr(shares, "trainers_share", lambda: 1)
    for _ in range(2):
        with slow_session.accumulate() as block:
            for _ in range(2):
                x = torch.randn(4, 8, device="cuda")
                for layer in layers:
                    x = slow_session.checkpoint(layer, x)
                block.backward(x.square().sum())
        report = slow_session.report().block  # which waits for the block's end
        slow_session._measure_block()
        assert report is not None
        assert report.trainer.segments > 0
        assert report.trainer.segment_s >= 2 * KERNELS
        assert report.others_s >= report.micro_batches * len(layers) * KERNELS
        assert shares._trainer_s >= 2 * KERNELS
        assert shares._forward_s >= len(layers) * KERNELS
