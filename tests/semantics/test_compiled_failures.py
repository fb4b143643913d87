"""Compiled segments where a worker is lost, or where code of ours fails: the gradients stay as they are."""

import functools
import gc
import weakref
from typing import Any

import pytest
from torch import Tensor

from backhaul import NotRemoteError
from backhaul._forward import captured_graph, known_call
from backhaul._forward.known_uses import KnownUses
from backhaul_runtime import errors
from backhaul_runtime.errors import Refusal
from backhaul_runtime.record.known_program import CHANGED, KnownCall
from support.bits import differing, plainly, seed_generators
from support.compiled import MARKS, WIDTH, block_like, inputs, own, reported, step
from support.loopback import Loopback

pytestmark = [*MARKS, pytest.mark.parametrize("check", ["values", "outputs"])]


def test_with_saved_tensors_that_differ_the_rest_stays_on_the_trainer(
    check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_note = KnownCall.note_saved
    for stop in range(6):
        remote, block, x = Loopback(), block_like(), inputs()
        for _ in range(2):
            assert not differing(step(plainly, block, x), step(own(remote, determinism_check=check), block, x))

        def note_saved(call: KnownCall, tensor: Tensor, stop: int = stop) -> int:
            if len(call.recording.saved) == stop:
                raise Refusal(CHANGED)
            return own_note(call, tensor)

        monkeypatch.setattr(KnownCall, "note_saved", note_saved)
        assert not differing(step(plainly, block, x, 1), step(own(remote, determinism_check=check), block, x, 1))
        monkeypatch.undo()
        assert reported(remote).reasons == {CHANGED: 2}


@pytest.mark.parametrize("strict", [False, True])
def test_a_lost_worker_leaves_the_gradients_as_they_are(check: str, strict: bool) -> None:
    remote, block, x = Loopback(), block_like(), inputs()
    checkpoint = functools.partial(own(remote, determinism_check=check), strict=strict)
    step(checkpoint, block, x)
    block.zero_grad()
    seed_generators(1)
    y = checkpoint(block, x)
    remote.is_lost = True
    if strict:
        with pytest.raises(NotRemoteError):
            y.sum().backward()
        return
    y.sum().backward()
    gradients = [x.grad, *(parameter.grad for parameter in block.parameters())]
    x.grad = None
    block.zero_grad()
    seed_generators(1)
    block(x).sum().backward()
    assert not differing([x.grad, *(parameter.grad for parameter in block.parameters())], gradients)


def test_a_segment_of_a_known_program_keeps_no_activation(check: str) -> None:
    remote, block, x = Loopback(), block_like(), inputs(64, 3, WIDTH) * 1
    for _ in range(3):
        own(remote, determinism_check=check)(block, x)
    alive: list[weakref.ref[Tensor]] = []

    def note(call: KnownCall, tensor: Tensor) -> int:
        held = [x, *block.parameters(), *block.buffers()]
        if tensor.data_ptr() not in {one.data_ptr() for one in held}:
            alive.append(weakref.ref(tensor))
        return own_note(call, tensor)

    own_note = KnownCall.note_saved
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KnownCall, "note_saved", note)
        y = own(remote, determinism_check=check)(block, x)
    assert alive
    assert not any(reference() is not None for reference in alive)
    assert remote.taken[-1]() is not None
    y.sum().backward()
    del y
    gc.collect()
    assert not any(taken() for taken in remote.taken)


@pytest.mark.slow
def test_a_saved_tensor_that_cannot_be_noted_leaves_the_gradients_as_they_are(
    check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_note = KnownCall.note_saved
    for stop in range(24):  # also in the middle of what one op saves
        remote, block, x = Loopback(), block_like(), inputs()
        for _ in range(2):
            step(own(remote, determinism_check=check), block, x)

        def note_saved(call: KnownCall, tensor: Tensor, stop: int = stop) -> int:
            position = own_note(call, tensor)
            if position == stop:
                raise InjectedError("injected")
            return position

        with monkeypatch.context() as patch:
            patch.setattr(KnownCall, "note_saved", note_saved)
            assert not differing(step(plainly, block, x, 1), step(own(remote, determinism_check=check), block, x, 1)), (
                stop
            )


class InjectedError(Exception):
    pass


STEPS: dict[str, tuple[Any, str]] = {
    "find the kind of a call": (captured_graph.CapturedGraph, "kind_of"),
    "learn from a call": (captured_graph, "known_program"),
    "begin a known call": (KnownCall, "__init__"),
    "find predecessors": (known_call, "predecessors_of"),
    "offer a segment": (known_call, "offer"),
    "note a saved tensor": (KnownCall, "note_saved"),
    "find the uses": (KnownUses, "of_call"),
    "make a lineage": (known_call, "lineage_of"),
    "graft": (known_call, "graft"),
    "note what was grafted": (known_call, "note_grafted"),
}


@pytest.mark.parametrize("step_name", STEPS)
def test_an_error_of_our_own_leaves_the_gradients_as_they_are(
    check: str, step_name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    remote, block, x = Loopback(), block_like(), inputs()
    owner, name = STEPS[step_name]
    if step_name != "learn from a call":
        for _ in range(2):
            step(own(remote, determinism_check=check), block, x)
    original, calls = getattr(owner, name), 0

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls % 3 == 1:  # the first time, and in the middle of calls
            raise InjectedError("injected")
        return original(*args, **kwargs)

    monkeypatch.setattr(errors, "_logged", set())
    monkeypatch.setattr(owner, name, failing)
    for seed in range(4):
        assert not differing(step(plainly, block, x, seed), step(own(remote, determinism_check=check), block, x, seed))
    assert calls
    assert "InjectedError" in caplog.text
