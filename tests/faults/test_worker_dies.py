"""A worker that dies or hangs at any moment of a step: the step ends with the same bits, and it is counted."""

import gc
import logging
import os
import signal
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import backhaul
from backhaul import Session
from backhaul._backward import lineage
from backhaul._backward.local_recompute import outputs_here
from conftest import QUIET, QUIET_S, quiet, settle, wait_until
from integration.test_discovery import Training
from numerics.cases import blocks, inputs
from support.bits import differing, grad_of, plainly, train
from support.devices import DEVICE
from support.nursery import ForkedCommand
from support.processes import WorkerProcess, in_order

LAYERS = 6
MOMENTS = ["forward", "between", "backward"]
RETURNS = ["gradients", "activations"]


def layers() -> nn.Module:
    return nn.ModuleList(block for _ in range(LAYERS // 2) for block in blocks())


def step(
    checkpoint: Any, model: Any, happen: Callable[[str], None] = lambda moment: None, at: int = LAYERS // 2
) -> tuple[Tensor, Sequence[Tensor]]:
    """A step that says where it is, in each part `at` a block."""
    x, h = inputs()
    for index, block in enumerate(model):
        if index == at:
            happen("forward")
            if h.requires_grad:
                h.register_hook(lambda _: happen("backward"))
        h = checkpoint(block, h)
    happen("between")
    return h.square().mean(), [x]


def train_through(
    session: Session,
    returns: str,
    moment: str,
    fault: Callable[[], object],
    durability: str = "lineage",
    at: int = LAYERS // 2,
) -> None:
    """Trains three steps; at the moment named the fault happens in the second."""
    passed = 0

    def happen(now: str) -> None:
        nonlocal passed
        passed += now == moment
        if now == moment and passed == 2:
            fault()

    steps = partial(train, build=layers, optimizer=partial(torch.optim.AdamW, lr=1e-2), steps=3)
    expected = steps(plainly, run=step)
    checkpoint = partial(session.checkpoint, returns=returns, durability=durability)
    ours = steps(checkpoint, run=partial(step, happen=happen, at=at))
    assert passed == 3
    assert differing(ours, expected) == []


@pytest.mark.slow
@pytest.mark.parametrize("returns", RETURNS)
@pytest.mark.parametrize("moment", MOMENTS)
def test_killed(moment: str, returns: str) -> None:
    with WorkerProcess() as worker, backhaul.connect(worker.address, settings=QUIET) as session:
        train_through(session, returns, moment, worker.kill)
        report = session.report()
        assert report.fallbacks >= LAYERS  # the whole third step, and what was lost and had not come ahead
        assert report.remote + report.fallbacks == 3 * LAYERS


@pytest.mark.slow
@pytest.mark.parametrize(("returns", "is_first"), [("gradients", False), ("activations", True)])
@pytest.mark.parametrize("moment", MOMENTS)
def test_one_of_two_killed(
    equal_speeds: None, worker: WorkerProcess, moment: str, returns: str, is_first: bool
) -> None:
    with WorkerProcess() as other:
        addresses = in_order(other, worker) if is_first else in_order(worker, other)
        with backhaul.connect(addresses, settings=QUIET) as session:
            at = LAYERS // 2 if is_first else LAYERS - 1  # so that it has segments then
            train_through(session, returns, moment, other.kill, at=at)
            report = session.report()
            may_be_none = moment == "backward"  # all results that are still needed may have come ahead
            assert (report.fallbacks or may_be_none) and report.fallbacks < LAYERS
            assert report.remote + report.fallbacks == 3 * LAYERS


@pytest.mark.slow
def test_segments_of_a_lost_worker_are_let_go_without_a_garbage_collection(
    equal_speeds: None, worker: WorkerProcess
) -> None:
    with WorkerProcess() as other, backhaul.connect(in_order(other, worker), settings=QUIET) as session:
        training = Training(session.checkpoint)
        training.steps(2)
        lost, _ = session._workers
        loss = training.forward()
        gc.collect()
        gc.disable()
        try:
            other.kill()
            training.step(loss)
            del loss
            assert session.report().fallbacks > 0
            wait_until(lambda: not lost.uploader.segments(), "the segments are let go")
        finally:
            gc.enable()


def wait_until_sent(session: Session) -> None:
    def only_the_first_is_here() -> bool:
        for worker in session._workers:
            worker.uploader.free_sent()
        return len(session.copies._tensors) == 1

    wait_until(only_the_first_is_here, "all boundaries but the first are sent and let go")


@pytest.mark.slow
def test_boundaries_that_the_survivor_has_are_not_computed_again(
    equal_speeds: None, worker: WorkerProcess, returns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    replays: list[str] = []

    def noted(name: str, *args: Any) -> dict[int, Tensor]:
        replays.append(name)
        return outputs_here(name, *args)

    def fetches() -> int:
        return sum(rpc.calls for rpc in worker.telemetry().rpcs if rpc.method == "FetchSources")

    def kill() -> None:
        wait_until_sent(session)
        other.kill()

    monkeypatch.setattr(lineage, "outputs_here", noted)
    before = fetches()
    with (
        WorkerProcess() as other,
        backhaul.connect(in_order(worker, other), settings=QUIET) as session,
    ):
        train_through(session, returns, "between", kill)
        assert session.report().fallbacks == LAYERS // 2
        assert "fetched boundaries" in str(session.report())
    # Of the last segment's input: from what the survivor's last segment started from.
    assert len(replays) == LAYERS // 2
    assert fetches() == before + 1


@pytest.mark.slow
def test_a_survivor_that_is_stopped_is_waited_for_once(equal_speeds: None, caplog: pytest.LogCaptureFixture) -> None:
    def stop() -> None:
        wait_until_sent(session)
        other.kill()
        os.kill(survivor.pid, signal.SIGSTOP)

    caplog.set_level(logging.DEBUG, "backhaul")
    with (
        WorkerProcess() as survivor,
        WorkerProcess() as other,
        backhaul.connect(in_order(survivor, other), settings=backhaul.Settings(silence_s=1.0)) as session,
    ):
        try:
            train_through(session, "gradients", "between", stop)
        finally:
            os.kill(survivor.pid, signal.SIGCONT)
        assert session.report().fallbacks >= LAYERS
    waited = [record.getMessage() for record in caplog.records if "fetching a boundary" in record.getMessage()]
    assert len([message for message in waited if survivor.address in message]) == 1


@pytest.mark.slow
def test_killed_with_copies_of_everything() -> None:
    with WorkerProcess() as worker, backhaul.connect(worker.address, settings=QUIET) as session:
        train_through(session, "gradients", "between", worker.kill, "host")


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_with_copies_of_nothing(moment: str) -> None:
    with WorkerProcess() as worker, backhaul.connect(worker.address, settings=QUIET) as session:

        def lose() -> None:
            if moment != "backward":
                settle(session)  # what has not been sent yet is not lost
            worker.kill()
            session._workers[0].connection._stubs.exchange.close()  # with what came before it was asked for

        with pytest.raises(backhaul.SegmentLostError, match=r"test_worker_dies\.py:\d+, is lost") as caught:
            train_through(session, "gradients", moment, lose, "none")
        assert caught.value.session == session.run


@pytest.mark.slow
@pytest.mark.parametrize("returns", RETURNS)
@pytest.mark.parametrize("moment", ["forward", "backward"])
def test_stopped(moment: str, returns: str) -> None:
    with (
        WorkerProcess() as worker,
        backhaul.connect(worker.address, settings=backhaul.Settings(silence_s=1.0)) as session,
    ):
        try:
            train_through(session, returns, moment, lambda: os.kill(worker.pid, signal.SIGSTOP))
        finally:
            session._workers[0].connection.silence_s = QUIET_S  # from here on a busy machine may be silent
            os.kill(worker.pid, signal.SIGCONT)
        assert session.report().fallbacks >= LAYERS  # what came ahead of the stop was not lost
        wait_until(lambda: session._workers[0].connection.up is not None, "the worker is back")
        before = session.report().remote
        train_through(session, returns, moment, lambda: None)
        assert session.report().remote == before + 3 * LAYERS


@pytest.mark.slow
def test_a_session_closes_though_its_worker_is_stopped_in_the_middle_of_an_upload() -> None:
    with backhaul.connect(settings=backhaul.Settings(silence_s=1.0, memory_bytes=1 << 30)) as session:
        assert session._embedded is not None
        stopped = session._embedded.pid
        assert stopped is not None
        h = torch.randn(1024, 1024, requires_grad=True)
        y = h
        for block in [nn.Linear(1024, 1024) for _ in range(6)]:
            y = session.checkpoint(block, y, returns="gradients")
        os.kill(stopped, signal.SIGSTOP)
        y.sum().backward()
        assert session.report().fallbacks > 0
    assert not Path(f"/proc/{stopped}").exists()


@pytest.mark.slow
def test_an_embedded_worker_that_dies_is_started_again(caplog: pytest.LogCaptureFixture) -> None:
    with backhaul.connect(settings=quiet(memory_bytes=1 << 30)) as session:
        assert session._embedded is not None
        first = session._embedded.pid
        assert first is not None
        train_through(session, "gradients", "backward", lambda: os.kill(first, signal.SIGKILL))
        wait_until(lambda: session._workers[0].connection.up is not None, "a new worker is up")
        assert session._embedded.pid not in {None, first}
        before = session.report()
        assert before.fallbacks > 0
        train_through(session, "gradients", "backward", lambda: None)
        assert session.report().fallbacks == before.fallbacks

        def said(text: str) -> int:
            return len([record for record in caplog.records if text in record.getMessage()])

        wait_until(lambda: said("worker.sock is back") > 0, "it is said, which comes after it is so")
        assert said("worker.sock is back") == said("Segments run on the trainer until the worker is back") == 1


@pytest.mark.slow
def test_a_worker_started_anew_at_the_same_address_is_a_new_one() -> None:
    with WorkerProcess() as first, backhaul.connect(first.address, settings=QUIET) as session:
        linear, x = nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)
        y = session.checkpoint(linear, x, returns="gradients")
        connection = session._workers[0].connection
        lost = connection.up
        first.kill()
        with WorkerProcess(listen=first.address):
            wait_until(lambda: connection.up not in (None, lost), "the new worker is found")
            y.sum().backward()
            assert torch.equal(grad_of(x), torch.autograd.grad(linear(x).sum(), x)[0])
            assert (session.report().remote, session.report().fallbacks) == (0, 1)
            session.checkpoint(linear, x, returns="gradients").sum().backward()
            assert session.report().remote == 1


@pytest.mark.slow
def test_a_lease_that_ran_out_is_renewed_by_a_new_session() -> None:
    with (
        WorkerProcess("--lease", "1") as worker,
        backhaul.connect(worker.address, settings=backhaul.Settings(silence_s=1.0)) as session,
    ):
        train_through(session, "gradients", "forward", lambda: None)
        os.kill(worker.pid, signal.SIGSTOP)
        wait_until(lambda: session._workers[0].connection.up is None, "the silence is noticed")
        os.kill(worker.pid, signal.SIGCONT)
        wait_until(lambda: session._workers[0].connection.up is not None, "the worker is back")
        before = session.report().remote
        train_through(session, "gradients", "forward", lambda: None)
        assert session.report().remote == before + 3 * LAYERS


@pytest.mark.slow
def test_strict_raises_in_backward_where_the_worker_is_gone() -> None:
    with WorkerProcess() as worker, backhaul.connect(worker.address, strict=True, settings=QUIET) as session:
        y = session.checkpoint(nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True), returns="gradients")
        worker.kill()
        with pytest.raises(backhaul.NotRemoteError, match="worker"):
            y.sum().backward()


@pytest.mark.slow
def test_a_dead_trainers_memory_is_free_within_its_lease() -> None:
    code = (
        "import signal, sys, torch, backhaul\n"
        "torch.set_default_device(sys.argv[2])\n"
        "session = backhaul.connect(sys.argv[1])\n"
        "y = session.checkpoint(torch.nn.Linear(64, 64), torch.randn(8, 64, requires_grad=True))\n"
        "z = session.checkpoint(torch.sin, torch.randn(3, requires_grad=True), returns='gradients')\n"
        "z.sum().backward()\n"
        "print('saved', flush=True)\n"
        "signal.pause()\n"
    )
    with WorkerProcess("--lease", "1") as worker, tempfile.TemporaryFile("w") as log:
        trainer = ForkedCommand(["-c", code, worker.address, DEVICE], log)
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "saved\n"
        assert worker.telemetry().memory.segment_bytes > 0
        trainer.kill()
        trainer.communicate()
        trainer.stdout.close()
        wait_until(lambda: not worker.telemetry().sessions, "the lease runs out")
        assert worker.telemetry().memory.segment_bytes == 0
