"""Steps and segments of a training as a worker's telemetry has them."""

from typing import Any

import pytest
import torch
from torch import nn

import backhaul
from backhaul import Session
from backhaul_proto.v1 import telemetry_pb2
from backhaul_proto.v1.telemetry_pb2 import Lane
from backhaul_runtime.version import version
from conftest import QUIET, quiet, settle, wait_until
from support.calls import TimesOne
from support.processes import WorkerProcess

REMOTE = [Lane.LANE_UPLOAD, Lane.LANE_RECOMPUTE, Lane.LANE_BACKWARD, Lane.LANE_WAIT]
"""What each call has. An answer that is as small as here comes in less time than two clocks can tell."""


def train(session: Session, steps: int, **options: object) -> None:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3)]
    optimizer = torch.optim.SGD([parameter for block in blocks for parameter in block.parameters()], lr=1e-3)
    for _ in range(steps):
        x = torch.randn(32, 64, requires_grad=True)
        for block in blocks:
            x = session.checkpoint(block, x, **options)
        x.sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def reports_of(session: Session, worker: WorkerProcess) -> list[telemetry_pb2.TrainerReport]:
    return [received.report for received in worker.reports() if received.report.run.id == session.run]


def told(session: Session, worker: WorkerProcess, *, calls: int, steps: int) -> list[telemetry_pb2.TrainerReport]:
    """Waits until so many calls and steps are told. The end of a step may be told after the last of its calls."""

    def is_told() -> bool:
        reports = reports_of(session, worker)
        counts = sum(len(report.calls) for report in reports), sum(len(report.steps) for report in reports)
        return counts[0] >= calls and counts[1] >= steps

    wait_until(is_told, "all is told")
    return reports_of(session, worker)


@pytest.mark.slow
def test_a_training_is_told_to_its_worker(session: Session, worker: WorkerProcess, returns: str) -> None:
    train(session, 3, returns=returns)
    reports = told(session, worker, calls=9, steps=3)
    steps = [step for report in reports for step in report.steps]
    calls = [call for report in reports for call in report.calls]

    assert [step.number for step in steps] == [0, 1, 2]
    report = session.report()
    for step in steps:
        assert (step.calls, step.fallbacks, step.on_trainer) == (3, 0, 0)
        assert getattr(step, returns) == 3
        assert step.duration_s > step.wait_s > 0
        assert step.saved_bytes > 2 * 32 * 256 * 4  # of each block GELU's input and output, where nothing else is kept
        assert step.peak_bytes > 1 << 19
    assert sum(call.up_bytes for call in calls) == report.up_bytes
    assert sum(call.down_bytes for call in calls) == report.down_bytes

    # A report that is sent during backward has the calls whose graph is freed by then: the last ones of their step.
    told_calls = sorted((call.step, call.number) for call in calls)
    assert told_calls == [(step, number) for step in range(3) for number in range(3)]
    for call in calls:
        assert (call.name, call.worker, call.decision) == ("Sequential", worker.address, returns)
        assert call.reason
        lanes = [span.lane for span in call.spans]
        expected = REMOTE if returns == "gradients" else [lane for lane in REMOTE if lane != Lane.LANE_BACKWARD]
        assert set(expected) <= set(lanes)
        forward = next(span for span in call.spans if span.lane == Lane.LANE_FORWARD)
        for span in call.spans:  # one host, one clock: a worker does nothing before it was given anything
            assert span.duration_s > 0
            assert span.started_at_s >= forward.started_at_s - 0.005  # the worker's clock is known to half a round trip


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_how_the_programs_of_calls_were_found_is_told(session: Session, worker: WorkerProcess) -> None:
    train(session, 4, graphs="eager")
    with nn.modules.module.register_module_forward_hook(lambda *_: None):
        session.checkpoint(nn.Tanh(), torch.randn(3, requires_grad=True), graphs="eager").sum().backward()
    session.step()
    calls = [call for report in told(session, worker, calls=13, steps=5) for call in report.calls]
    *first, hooked = [call.capture for call in sorted(calls, key=lambda call: (call.step, call.number))]
    assert [capture.is_known for capture in first[:3] + first[9:]] == [False] * 3 + [True] * 3
    assert len({capture.program for capture in first}) == 2  # only the first layer has an input that is a leaf
    assert [capture.reason for capture in first] == [""] * 12
    assert hooked.program not in {0, *(capture.program for capture in first)}
    assert not hooked.is_known
    assert hooked.reason == "hooks that run for all modules are registered"
    compilations = [one for capture in (*first, hooked) for one in capture.compilations]
    assert len(compilations) == 1
    assert all(one.took_s > 0 for one in compilations)
    layers, function = session.report().segments
    assert (layers.programs, layers.known, layers.compilations) == (2, sum(one.is_known for one in first), 1)
    assert (function.programs, function.known, function.compilations) == (1, 0, 0)


@pytest.mark.slow
def test_a_block_is_told_with_its_shares_and_micro_batches(session: Session, worker: WorkerProcess) -> None:
    blocks = [nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(4)]
    with session.accumulate() as step:
        for _ in range(3):
            x = torch.randn(8, 16, requires_grad=True)
            for block in blocks:
                x = session.checkpoint(block, x)
            step.backward(x.sum())
    session.step()
    session.checkpoint(blocks[0], torch.randn(8, 16, requires_grad=True)).sum().backward()
    session.step()
    reports = told(session, worker, calls=13, steps=2)
    deferred, plain = (step for report in reports for step in report.steps)
    report = session.report().block
    assert report is not None
    assert not plain.HasField("block")
    assert (deferred.block.micro_batches, deferred.block.took_s, deferred.block.others_s) == (
        3,
        report.took_s,
        report.others_s,
    )
    assert deferred.block.pending_gradient_bytes == report.pending_gradient_bytes
    shares = [(share.worker, share.segments, share.segment_s) for share in deferred.block.shares]
    remote = report.workers[worker.address]
    assert shares == [
        ("", report.trainer.segments, report.trainer.segment_s),
        (worker.address, remote.segments, remote.segment_s),
    ]
    assert report.trainer.segments + remote.segments == 12
    calls = [(call.step, call.number, call.micro_batch) for report in reports for call in report.calls]
    assert sorted(calls) == [*((0, number, 1 + number // 4) for number in range(12)), (1, 0, 0)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "decision", "why"),
    [
        (lambda x: (x.exp().sin(), x.view(2, 4)), "activations", "shares memory"),
        (lambda x: (TimesOne.apply(x.exp()).sin(),), "kept", "TimesOne"),
    ],
)
def test_why_activations_come_back_or_are_kept_is_told(
    session: Session, worker: WorkerProcess, function: Any, decision: str, why: str
) -> None:
    session.checkpoint(function, torch.randn(8, requires_grad=True))[0].sum().backward()
    session.step(3.5)
    reports = told(session, worker, calls=1, steps=1)
    (call,) = [call for report in reports for call in report.calls]
    assert why in call.reason
    assert (call.decision, call.is_fallback) == (decision, False)
    assert [step.loss for report in reports for step in report.steps] == [3.5]


def test_sessions_are_known_by_their_run_and_what_they_hold(session: Session, worker: WorkerProcess) -> None:
    held = session.checkpoint(torch.sin, torch.randn(1 << 18, requires_grad=True), returns="gradients")
    settle(session)
    (reported,) = [reported for reported in worker.telemetry().sessions if reported.run == session.run]
    assert reported.held_bytes >= 1 << 20
    assert len(reported.run) == 16
    assert reported.client_version == version()
    held.sum().backward()


def test_without_telemetry_nothing_is_told(worker: WorkerProcess) -> None:
    with backhaul.connect(worker.address, settings=quiet(telemetry=False)) as session:
        train(session, 2)
        session.step(1.0)
    assert reports_of(session, worker) == []


def test_a_worker_that_is_gone_takes_no_telemetry_and_holds_nobody_up(own_worker: WorkerProcess) -> None:
    with backhaul.connect(own_worker.address, settings=QUIET) as session:
        train(session, 1)
        own_worker.kill()
        train(session, 2)
        assert session.report().fallbacks == 6
    assert session.telemetry is not None
    assert not session.telemetry._thread.is_alive()
