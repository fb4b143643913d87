"""The choice of speculative work, without a store and without threads: events go in, and instructions come out."""

from dataclasses import replace

import pytest
import torch

from backhaul_runtime.program.codec import decode_program
from backhaul_runtime.replay.schedule import Schedule
from backhaul_runtime.tensors.layout import layout_of
from backhaul_runtime.torch_internals import ambient_state
from backhaul_runtime.wire.bundle import bundle
from backhaul_runtime.wire.tensor_batches import OutgoingTensor
from backhaul_server.worker.accounts import Account
from backhaul_server.worker.engine.executions import BackwardInputs, ExecutionResult, LiveReplay, SegmentInputs
from backhaul_server.worker.engine.segment import Segment, SessionState, SpeculativeBackward
from backhaul_server.worker.engine.speculation import Keep, ReplayAgain, Speculate, Speculator
from unit.test_core import squaring

NEED_BYTES, ROOM_BYTES = 100, 1_000
STATE = ambient_state.capture()


@pytest.fixture
def speculator() -> Speculator:
    return Speculator(Schedule())


@pytest.fixture
def session() -> SessionState:
    return SessionState("session", Account(), "trainer", 0.0)


def saved(speculator: Speculator, session: SessionState, number: int) -> Segment:
    """A segment that squares its input, which is the output of the segment before."""
    program = decode_program(squaring(), torch.device("cpu"))
    segment = Segment(
        session, number, SegmentInputs(program, [torch.ones(4)], []), "square", {0: (number - 1, 0)}, (b"p",)
    )
    session.segments[number] = segment
    speculator.add(segment, NEED_BYTES, 0)
    return segment


def replayed(segment: Segment) -> LiveReplay:
    assert segment.inputs is not None
    return segment.inputs.replay(keep_saved=False)


def result_from(gradient: torch.Tensor) -> ExecutionResult:
    outgoing = OutgoingTensor(gradient, layout_of(gradient), b"address")
    return ExecutionResult(bundle([]), (), (), chained={0: outgoing})


def test_only_what_is_expected_is_replayed(speculator: Speculator, session: SessionState) -> None:
    first, second = (saved(speculator, session, number) for number in (1, 2))
    assert speculator.next(ROOM_BYTES) is None
    assert speculator.expect(second)
    assert speculator.next(ROOM_BYTES) == Speculate(second, ())
    second.machine.replay_ahead()
    assert not speculator.expect(second)
    assert first.machine.story == ()


def test_a_replay_is_kept_with_the_bytes_that_it_holds(speculator: Speculator, session: SessionState) -> None:
    segment = saved(speculator, session, 1)
    made = replayed(segment)
    assert speculator.replayed(segment, made) == [Keep(segment, NEED_BYTES)]
    assert segment.ready is made


def test_a_replay_that_failed_leaves_nothing(speculator: Speculator, session: SessionState) -> None:
    segment = saved(speculator, session, 1)
    segment.speculation = SpeculativeBackward(BackwardInputs((), STATE), {})
    assert speculator.replayed(segment, None) == [Keep(segment, None)]
    assert segment.ready is None
    assert segment.speculation is None
    assert speculator.misses == 0


def test_a_replay_with_other_draws_than_its_call_runs_again(
    speculator: Speculator, session: SessionState, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment = saved(speculator, session, 1)
    monkeypatch.setattr(Segment, "matches_recorded_rng", lambda *_: False)
    assert speculator.replayed(segment, replayed(segment)) == [Keep(segment, None), ReplayAgain(segment)]
    assert (segment.ready, speculator.misses, list(session.unpredictable)) == (None, 1, [b"p"])


def test_a_predicted_backward_is_worked_on_and_then_taken_once(speculator: Speculator, session: SessionState) -> None:
    first, second = (saved(speculator, session, number) for number in (1, 2))
    first.ready = replayed(first)
    inputs = BackwardInputs((), STATE)
    speculator.predict_backwards(second, result_from(torch.ones(4)), inputs)
    predicted = first.speculation
    assert predicted is not None
    assert predicted.inputs.addresses == ((0, b"address"),)
    assert speculator.next(ROOM_BYTES) == Speculate(first, ())
    result = ExecutionResult(bundle([]), (), ())
    first.ready = None
    (kept,) = speculator.ran_backwards([first], [replace(predicted, result=result)])
    assert kept == Keep(first, result.live_bytes([]), is_done=True)
    assert speculator.take(first, predicted.inputs) is result
    assert speculator.take(first, predicted.inputs) is None
    assert (speculator.hits, speculator.misses) == (1, 0)


def test_a_backward_from_other_gradients_is_a_miss(speculator: Speculator, session: SessionState) -> None:
    segment = saved(speculator, session, 1)
    segment.speculation = SpeculativeBackward(BackwardInputs((), STATE), {}, ExecutionResult(bundle([]), (), ()))
    assert speculator.take(segment, BackwardInputs(((0, b"other"),), STATE)) is None
    assert (speculator.hits, speculator.misses) == (0, 1)


def test_backwards_behind_one_that_failed_leave_their_replays(speculator: Speculator, session: SessionState) -> None:
    first, second = (saved(speculator, session, number) for number in (1, 2))
    first.ready = replayed(first)
    assert speculator.ran_backwards([second, first], []) == [Keep(second, None), Keep(first, NEED_BYTES)]


def test_a_segment_released_during_its_backward_leaves_nothing(speculator: Speculator, session: SessionState) -> None:
    segment = saved(speculator, session, 1)
    ran = SpeculativeBackward(BackwardInputs((), STATE), {}, ExecutionResult(bundle([]), (), ()))
    speculator.remove(segment)
    segment.inputs = None
    assert speculator.ran_backwards([segment], [ran]) == [Keep(segment, None)]
    assert segment.speculation is None
    assert speculator.next(ROOM_BYTES) is None
