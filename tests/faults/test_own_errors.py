"""An error of Backhaul's own code in forward does not reach the user's: gradients are right, and the report says it."""

import itertools
import logging
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import backhaul
from backhaul import NotRemoteError, Session
from backhaul._backward.handles import HandleTable
from backhaul._backward.lineage import Lineage
from backhaul._dispatch import prediction
from backhaul._dispatch.dispatcher import Dispatcher
from backhaul._forward import checkpoint, keep, saved_tensor_hooks
from backhaul._forward.saved_tensor_hooks import SavedTensorHooks
from backhaul._observe.call_log import CallLog
from backhaul._observe.journal import SegmentLog
from backhaul._observe.telemetry import Telemetry
from backhaul._worker_client.upload.segment_sender import SegmentSender
from backhaul._worker_client.upload.uploader import Uploader
from backhaul_proto.v1 import segment_pb2
from backhaul_runtime import errors
from backhaul_runtime.record import op_recorder
from backhaul_runtime.record.known_tensors import KnownTensors
from backhaul_runtime.record.op_recorder import OpRecorder
from backhaul_runtime.record.recorder import Recorder
from backhaul_runtime.record.saved_tensors import SavedTensorRecorder
from backhaul_runtime.record.sources import SourceLedger
from backhaul_runtime.wire.splicing import encode_all
from conftest import QUIET
from support.bits import differing
from support.processes import WorkerProcess

STEPS: dict[str, tuple[Any, str]] = {
    "name a call": (checkpoint, "name_of"),
    "ask who keeps activations": (Dispatcher, "keeps_activations"),
    "find the device of a call": (checkpoint, "device_of_work"),
    "measure a call": (checkpoint, "Stopwatch"),
    "look up the rules of an op": (op_recorder, "rules"),
    "note an op": (OpRecorder, "_begin"),
    "copy what an op writes to": (OpRecorder, "_prepare_writes"),
    "note results": (OpRecorder, "after"),
    "find what an op made": (KnownTensors, "add_results"),
    "note a saved tensor": (SavedTensorRecorder, "_saved"),
    "make a handle": (HandleTable, "add"),
    "look for a statistic": (saved_tensor_hooks, "hides_write"),
    "look for a kept region": (saved_tensor_hooks, "is_in_kept_region"),
    "look at a saved tensor": (saved_tensor_hooks, "unsupported_reason"),
    "count a saved tensor": (SavedTensorHooks, "_count"),
    "predict a call": (prediction.CallSite, "predict"),
    "begin a call": (Dispatcher, "begin"),
    "look for holders of outputs": (keep, "has_other_references"),
    "find edges of sources": (SourceLedger, "edges"),
    "decide": (keep, "decide"),
    "cut the graph": (keep, "find_graph_uses"),
    "finish the program": (Recorder, "finish"),
    "offer a segment": (Dispatcher, "save"),
    "encode a program": (prediction, "encode_program"),
    "queue a segment": (Uploader, "save"),
    "find recipes": (Lineage, "find_recipes"),
    "mark what a segment takes": (keep, "mark_given"),
    "graft": (keep, "graft"),
    "mark what a segment returns": (keep, "mark_returned"),
    "drop copies": (Lineage, "release"),
}
COUNTS: dict[str, tuple[Any, str]] = {
    "count a call": (SegmentLog, "call"),
    "report a call": (Telemetry, "began"),
    "count a recomputation": (SegmentLog, "add"),
    "count bytes": (SegmentLog, "traffic"),
    "report a forward": (Telemetry, "hold"),
    "report a recomputation": (Telemetry, "recomputed"),
    "count what is taken": (CallLog, "_span"),
}


class InjectedError(Exception):
    pass


@pytest.fixture(params=STEPS | COUNTS)
def step(request: pytest.FixtureRequest, session: Session, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A step that raises from its third call on: in the middle of a call, and in each one until the session ends."""
    owner, name = (STEPS | COUNTS)[request.param]
    own: Callable[..., Any] = getattr(owner, name)
    calls = 0

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls >= 3:
            raise InjectedError("injected")
        return own(*args, **kwargs)

    monkeypatch.setattr(owner, name, failing)
    monkeypatch.setattr(errors, "_logged", set())
    yield str(request.param)
    monkeypatch.undo()  # the end of the session checks that nothing is left behind


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.dropout(self.norm(self.linear(x)).relu_(), 0.3)


def gradients(checkpoint: Callable[..., Any]) -> list[Tensor | None]:
    torch.manual_seed(0)
    blocks = nn.ModuleList(Block() for _ in range(3))
    x = torch.randn(4, 8, requires_grad=True)
    for _ in range(3):
        y = x
        for block in blocks:
            y = checkpoint(block, y)
        y.square().mean().backward()
    return [x.grad, *(parameter.grad for parameter in blocks.parameters())]


def expected() -> list[Tensor | None]:
    return gradients(lambda block, x: block(x))


@pytest.mark.slow
def test_no_step_of_forward_disturbs_training(
    step: str, session: Session, returns: str, caplog: pytest.LogCaptureFixture
) -> None:
    plain = expected()
    with caplog.at_level(logging.ERROR, "backhaul"):
        ours = gradients(lambda block, x: session.checkpoint(block, x, returns=returns))
    assert differing(ours, plain) == []
    logged = [record for record in caplog.records if "An error inside Backhaul" in record.message]
    has_step = step not in {"cut the graph", "graft"} or returns == "gradients"
    assert len(logged) == has_step  # once, however often
    assert ("InjectedError: injected" in str(session.report())) == (has_step and step in STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("step", ["note an op", "offer a segment", "graft", "begin a call"], indirect=True)
def test_strict_raises_from_the_error(step: str, session: Session) -> None:
    with pytest.raises(NotRemoteError, match="recording failed: InjectedError: injected") as raised:
        gradients(lambda block, x: session.checkpoint(block, x, returns="gradients", strict=True))
    assert isinstance(raised.value.__cause__, InjectedError)


@pytest.mark.slow
def test_an_error_of_the_sending_thread_is_a_fallback(
    session: Session, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(*_: Any) -> None:
        raise InjectedError("injected")

    monkeypatch.setattr(SegmentSender, "send", failing)
    monkeypatch.setattr(errors, "_logged", set())
    plain = expected()
    with caplog.at_level(logging.ERROR, "backhaul"):
        ours = gradients(session.checkpoint)
    monkeypatch.undo()
    assert differing(ours, plain) == []
    assert "sending failed: InjectedError: injected" in str(session.report())
    assert len([record for record in caplog.records if "Traceback" in record.getMessage()]) == 1


@pytest.mark.parametrize("step_at", [(Uploader, "_release"), (Uploader, "_save")])
def test_the_sending_thread_survives_errors(
    step_at: tuple[type, str], session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it ended, forward would wait for room in its queue for ever."""
    own, calls = getattr(*step_at), itertools.count()

    def failing_once(*args: Any) -> Any:
        if next(calls) == 0:
            raise InjectedError("injected")
        return own(*args)

    monkeypatch.setattr(*step_at, failing_once)
    plain = expected()
    for _ in range(6):  # more segments than may wait
        assert differing(gradients(session.checkpoint), plain) == []
    assert next(calls) > 1


def test_a_request_that_cannot_be_encoded_is_a_fallback(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(batches: Any, number: int, request: segment_pb2.Request) -> Any:
        if request.HasField("recompute"):
            raise InjectedError("injected")
        return encode_all(batches, number, request)

    plain = expected()
    monkeypatch.setattr("backhaul._worker_client.connection.exchange.encode_all", failing)
    ours = gradients(lambda block, x: session.checkpoint(block, x, returns="activations"))
    monkeypatch.undo()
    assert differing(ours, plain) == []
    assert "a request could not be sent" in str(session.report())


@pytest.mark.parametrize(
    "step_at",
    [
        "backhaul._worker_client.remote_segment.contributions_in",
        "backhaul._worker_client.remote_segment.saved_views",
        "backhaul._backward.frame.check_recomputed",
    ],
)
@pytest.mark.parametrize("in_block", [False, True])
def test_an_error_in_backward_is_a_fallback(
    step_at: str,
    in_block: bool,
    returns: str,
    session: Session,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    injected = itertools.count()

    def failing(*_: Any, **__: Any) -> None:
        next(injected)
        raise InjectedError("injected")

    plain = expected()
    monkeypatch.setattr(errors, "_logged", set())
    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR, "backhaul"):
        patch.setattr(step_at, failing)
        with session.accumulate() if in_block else nullcontext():
            ours = gradients(lambda block, x: session.checkpoint(block, x, returns=returns))
    assert differing(ours, plain) == []
    if next(injected):
        assert "the answer could not be used: InjectedError: injected" in str(session.report())
        assert [record for record in caplog.records if "Traceback" in record.getMessage()]


def test_a_session_closes_although_nothing_can_be_released(
    worker: WorkerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any) -> None:
        raise InjectedError("injected")

    with backhaul.connect(worker.address, settings=QUIET) as session:
        plain = expected()
        monkeypatch.setattr(Uploader, "_release", failing)
        assert differing(gradients(session.checkpoint), plain) == []


@pytest.mark.parametrize(
    "step_at",
    [
        "backhaul._forward.checkpoint.Recorder.__init__",
        "backhaul._dispatch.dispatcher.Dispatcher.records_choices",
    ],
)
def test_a_call_that_cannot_be_prepared_or_reported_runs(
    step_at: str, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any, **__: Any) -> None:
        raise InjectedError("injected")

    x = torch.ones(3, requires_grad=True)
    with monkeypatch.context() as patch:
        patch.setattr(step_at, failing)
        session.checkpoint(torch.sin, x).sum().backward()
        if "forward.checkpoint" in step_at:
            with pytest.raises(NotRemoteError, match="injected") as raised:
                session.checkpoint(torch.sin, x, strict=True)
            assert isinstance(raised.value.__cause__, InjectedError)
            assert "injected" in str(session.report())
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones(3).cos())
