"""What fails or is interrupted while a block opens, and after it has delivered its gradients."""

import linecache
import logging
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

from backhaul import Session
from backhaul import _session as session_module
from backhaul._accumulate.block import AccumulationBlock
from backhaul._accumulate.block_times import EndedBlock
from backhaul._accumulate.gradients import PendingGradients
from backhaul._accumulate.reductions import Reductions
from backhaul._accumulate.remote_chains import RemoteChains
from backhaul._dispatch import dispatcher
from backhaul_runtime import errors
from backhaul_runtime.record.contents import FixedDigests
from backhaul_runtime.tensors.stopwatch import Stopwatch
from support.bits import differing, plainly
from support.blocks import WIDTH, Model, loop
from support.interrupts import interrupted_at

LATER = {
    "forget digests": (FixedDigests, "forget"),
    "end digests": (FixedDigests, "end"),
    "forget reductions": (Reductions, "end"),
    "abandon reductions": (Reductions, "abandon"),
    "drop gradients": (PendingGradients, "drop"),
    "end threads": (RemoteChains, "end"),
    "stop the time": (Stopwatch, "stop"),
    "describe the block": (AccumulationBlock, "ended"),
    "report": (EndedBlock, "report"),
}


class InjectedError(Exception):
    pass


@pytest.fixture(params=LATER)
def step(request: pytest.FixtureRequest) -> tuple[Any, str]:
    """A method that is called after the gradients were delivered, and perhaps before, too."""
    return LATER[request.param]


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Has an item once a block has delivered its gradients."""
    delivered = list[bool]()
    own = PendingGradients.deliver

    def deliver(self: PendingGradients, *args: Any) -> None:
        own(self, *args)
        delivered.append(True)

    monkeypatch.setattr(PendingGradients, "deliver", deliver)
    yield delivered
    assert delivered


def fail(monkeypatch: pytest.MonkeyPatch, step: tuple[Any, str], ended: list[bool], error: BaseException) -> None:
    """Lets a method raise an error once, after the delivery."""
    own, raised = getattr(*step), list[bool]()

    def failing(*args: Any, **kwargs: Any) -> Any:
        returned = own(*args, **kwargs)
        if ended and not raised:
            raised.append(True)
            raise error
        return returned

    monkeypatch.setattr(*step, failing)


def train(session: Session | None, model: Model) -> None:
    torch.manual_seed(1)
    with session.accumulate() if session is not None else loop() as block:
        for _ in range(2):
            loss = model.loss(plainly if session is None else session.checkpoint, torch.randn(8, WIDTH))
            block.backward(loss)


def model_of(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model("plain")


def gradients(model: Model) -> list[Tensor | None]:
    return [parameter.grad for parameter in model.parameters()]


def plain() -> list[Tensor | None]:
    model = model_of()
    train(None, model)
    return gradients(model)


def test_an_error_after_the_delivery_is_logged(
    session: Session,
    step: tuple[Any, str],
    ended: list[bool],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = model_of()
    monkeypatch.setattr(errors, "_logged", set())
    fail(monkeypatch, step, ended, InjectedError("injected"))
    with caplog.at_level(logging.ERROR, "backhaul"):
        train(session, model)
    assert differing(gradients(model), plain()) == []
    (record,) = [record for record in caplog.records if "An error inside Backhaul" in record.message]
    assert "are complete" in record.message
    monkeypatch.undo()
    again = model_of()
    train(session, again)
    assert differing(gradients(again), plain()) == []


def test_an_interrupt_after_the_delivery_says_so(
    session: Session, step: tuple[Any, str], ended: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of()
    fail(monkeypatch, step, ended, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt) as raised:
        train(session, model)
    assert "have reached .grad" in "".join(raised.value.__notes__)
    assert differing(gradients(model), plain()) == []
    monkeypatch.undo()
    again = model_of()
    train(session, again)
    assert differing(gradients(again), plain()) == []


def test_an_error_before_the_delivery_has_no_note(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of()

    def failing(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(PendingGradients, "deliver", failing)
        with pytest.raises(KeyboardInterrupt) as raised:
            train(session, model)
    assert not hasattr(raised.value, "__notes__")
    assert gradients(model) == [None] * len(gradients(model))
    train(session, model)
    assert differing(gradients(model), plain()) == []


OPENING = {"accumulate", "_only_block", "accumulating"}


def opens_or_ends(frame: FrameType) -> bool:
    """Whether a line is one of what opens and ends a block, and takes or releases no lock."""
    code = frame.f_code
    if code.co_name not in OPENING or code.co_filename not in (session_module.__file__, dispatcher.__file__):
        return False
    return not linecache.getline(code.co_filename, frame.f_lineno).strip().startswith("with ")


def test_a_block_opens_after_one_that_was_interrupted_at_any_line(session: Session) -> None:
    def open_and_end() -> None:
        with session.accumulate():
            pass

    number = 0
    while interrupted_at(number, open_and_end, opens_or_ends):
        assert session._dispatcher.fixed is None
        open_and_end()
        number += 1
    assert number > 30
    model = model_of()
    train(session, model)
    assert differing(gradients(model), plain()) == []
