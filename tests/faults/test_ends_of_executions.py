"""The ends of a long run: the end of its session, its deadline, and for a single op the end of the process."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import backhaul
from backhaul import ReplayError, SegmentUnknownError
from backhaul_proto.v1 import segment_pb2, session_pb2
from backhaul_runtime.program.program import Node, SourceRef
from conftest import QUIET, wait_until
from support.bits import grad_of
from support.devices import on_the_host
from support.hostile import REFUSED, Hostile, of_nodes
from support.processes import WorkerProcess

X = SourceRef(0)
LONG = of_nodes(*[Node("aten.cdist.default", (X, X, 1.5, None), (), 0, (4 * 64 * 64,), draws=False)] * 2_000)
"""Number of ops on 64 rows of 8,192 numbers that take minutes together, but far less than a second each."""

ENDLESS = of_nodes(Node("aten.cdist.default", (X, X, 1.5, None), (), 0, (4 * 2_048 * 2_048,), draws=False))
"""An op on 2,048 rows of 8,192 numbers, which takes minutes."""


def start(client: Hostile) -> Any:
    """Requests a long run, and returns when it has begun."""
    client.ready(LONG, torch.rand(64, 8_192))
    call = client.recompute(1, positions=())
    while not next(call).progress.running:
        pass
    return call


def step(session: backhaul.Session) -> backhaul.Report:
    """Trains a little. The segments may run on the worker or on the trainer."""
    x = torch.randn(3, requires_grad=True)
    session.checkpoint(torch.sin, x, returns="gradients").sum().backward()
    assert torch.equal(grad_of(x), x.detach().cos())
    return session.report()


def error_from(call: Any) -> Exception:
    with pytest.raises(REFUSED) as caught:
        list(call)
    return caught.value


def close(client: Hostile) -> None:
    client.sessions.CloseSession(session_pb2.CloseSessionRequest(session=client.session), timeout=60)


def release(client: Hostile) -> None:
    client.ask(release=segment_pb2.ReleaseRequest(keys=[client.key(1)]))


@pytest.mark.slow
@pytest.mark.parametrize("end", [close, release])
def test_an_execution_is_cancelled_with_its_segment(worker: WorkerProcess, end: Callable[[Hostile], None]) -> None:
    with Hostile(worker.address) as client:
        call = start(client)
        end(client)
        assert isinstance(error_from(call), SegmentUnknownError | backhaul.SessionUnknownError)
        wait_until(lambda: worker.telemetry().queued_requests == 0, "nothing runs")
        close(client)


@pytest.mark.slow
@on_the_host("a device gets all ops of a run at once, and nothing ends them")
def test_an_execution_ends_at_its_deadline_and_an_op_that_does_not_ends_the_process() -> None:
    one_core = {"OMP_NUM_THREADS": "1"}  # what never ends keeps no other test waiting
    with WorkerProcess("--execution-limit", "1", "--memory", "1GiB", supervised=True, environment=one_core) as worker:
        with Hostile(worker.address) as client:
            error = error_from(start(client))
            assert isinstance(error, ReplayError)
            assert "the execution was ended after 1 s: make segments smaller" in error.message
            process = worker.serving()
            assert process == worker.pid
            with backhaul.connect(worker.address, settings=QUIET) as session:
                client.ready(ENDLESS, torch.rand(2_048, 8_192), segment=2)
                error_from(client.recompute(2, positions=()))
                step(session)
                assert session.report().fallbacks == 1
                wait_until(lambda: worker.serving() not in {0, process}, "another process is started")
                wait_until(lambda: step(session).remote > 0, "segments are remote again")
        logged = worker.logged()
    assert "An op of a segment for hostile still runs after 3 s. An execution may take 1 s" in logged
    assert "The worker ended itself because an op did not end: it is restarted in 0 s" in logged
