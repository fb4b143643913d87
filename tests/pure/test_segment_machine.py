from collections.abc import Callable, Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from backhaul_server.worker.engine.segment_machine import (
    MAX_EVENTS,
    TRANSITIONS,
    Answer,
    AnswerError,
    DropReplay,
    Execute,
    ForgetResult,
    Free,
    InvalidTransitionError,
    Key,
    Phase,
    ReplayAhead,
    SegmentMachine,
    SpeculateBackward,
)

FIRST, SECOND = Key("backward", 1), Key("backward", 2)


def test_a_request_runs_and_is_answered() -> None:
    machine = SegmentMachine()
    assert machine.requested(FIRST) == [Execute(FIRST)]
    assert machine.ran(FIRST, succeeded=True) == [Answer(FIRST)]
    assert machine.phase is Phase.SAVED


def test_a_repeated_request_joins_the_one_that_runs() -> None:
    machine = SegmentMachine()
    machine.requested(FIRST)
    assert machine.requested(FIRST) == []
    assert machine.ran(FIRST, succeeded=True) == [Answer(FIRST)]


def test_a_repeated_request_is_answered_from_its_result() -> None:
    machine = SegmentMachine()
    machine.requested(FIRST)
    machine.ran(FIRST, succeeded=True)
    assert machine.requested(FIRST) == [Answer(FIRST)]


def test_a_later_backward_forgets_the_results_of_earlier_ones() -> None:
    machine = SegmentMachine()
    machine.requested(FIRST)
    machine.ran(FIRST, succeeded=True)
    assert machine.requested(SECOND) == [ForgetResult(FIRST), Execute(SECOND)]


def test_a_failed_request_is_not_remembered() -> None:
    machine = SegmentMachine()
    machine.requested(FIRST)
    assert machine.ran(FIRST, succeeded=False) == [AnswerError(FIRST)]
    assert machine.requested(FIRST) == [Execute(FIRST)]


def test_a_replay_ahead_is_used_by_the_request() -> None:
    machine = SegmentMachine()
    assert machine.replay_ahead() == [ReplayAhead()]
    assert machine.replayed(succeeded=True) == []
    assert machine.phase is Phase.READY
    assert machine.requested(FIRST) == [Execute(FIRST)]


def test_a_request_waits_for_the_replay_ahead() -> None:
    machine = SegmentMachine()
    machine.replay_ahead()
    assert machine.requested(FIRST) == []
    assert machine.replayed(succeeded=True) == [Execute(FIRST)]


@pytest.mark.parametrize("succeeded", [True, False])
def test_a_failed_replay_ahead_leaves_the_error_to_the_request(succeeded: bool) -> None:
    machine = SegmentMachine()
    machine.replay_ahead()
    machine.requested(FIRST)
    machine.replayed(succeeded=False)
    assert machine.ran(FIRST, succeeded=succeeded) == [Answer(FIRST) if succeeded else AnswerError(FIRST)]


def test_a_dropped_replay_is_made_again() -> None:
    machine = SegmentMachine()
    machine.replay_ahead()
    machine.replayed(succeeded=True)
    machine.dropped()
    assert machine.replay_ahead() == [ReplayAhead()]


def test_release_frees_everything_once() -> None:
    machine = SegmentMachine()
    machine.requested(FIRST)
    machine.ran(FIRST, succeeded=True)
    machine.replay_ahead()
    machine.replayed(succeeded=True)
    assert machine.released() == [ForgetResult(FIRST), DropReplay(), Free()]
    assert machine.released() == []
    assert machine.requested(FIRST) == [AnswerError(FIRST)]


def test_a_release_during_an_execution_drops_the_result() -> None:
    machine = SegmentMachine()
    machine.requested(FIRST)
    machine.requested(SECOND)
    assert machine.released() == [AnswerError(SECOND), Free()]
    assert machine.ran(FIRST, succeeded=True) == [ForgetResult(FIRST), AnswerError(FIRST)]


@given(st.lists(st.sampled_from(["ahead", "first", "second", "done", "failed", "dropped", "released"]), max_size=30))
def test_every_request_is_answered_exactly_once_whatever_happens(events: list[str]) -> None:
    machine = SegmentMachine()
    replaying = False
    running: Key | None = None
    asked: list[Key] = []
    answered: list[Key] = []
    freed = 0

    def carry_out(instructions: Sequence[object]) -> None:
        nonlocal replaying, running, freed
        for instruction in instructions:
            match instruction:
                case ReplayAhead():
                    assert not replaying
                    assert running is None
                    replaying = True
                case Execute(key):
                    assert not replaying
                    assert running is None
                    running = key
                case Answer(key) | AnswerError(key):
                    answered.append(key)
                case Free():
                    freed += 1

    for event in [*events, "done", "done", "done", "released"]:
        if event in {"first", "second"}:
            key = FIRST if event == "first" else SECOND
            joined = not machine.is_released and (key == running or key in machine.waiting)
            asked += [] if joined else [key]
            carry_out(machine.requested(key))
        elif event == "ahead":
            if machine.phase is Phase.SAVED:
                carry_out(machine.replay_ahead())
        elif event == "dropped":
            if machine.phase in {Phase.READY, Phase.RUNNING}:
                machine.dropped()
        elif event == "released":
            carry_out(machine.released())
        elif replaying:
            replaying = False
            carry_out(machine.replayed(succeeded=event == "done"))
        elif running is not None:
            key, running = running, None
            carry_out(machine.ran(key, succeeded=event == "done"))
    assert sorted(asked, key=repr) == sorted(answered, key=repr)
    assert freed == 1


EVENTS: dict[str, Callable[[SegmentMachine], object]] = {
    "replay_ahead": lambda machine: machine.replay_ahead(),
    "speculate": lambda machine: machine.speculate(),
    "requested": lambda machine: machine.requested(FIRST),
    "replayed": lambda machine: machine.replayed(succeeded=True),
    "replay_failed": lambda machine: machine.replayed(succeeded=False),
    "ran": lambda machine: machine.ran(FIRST, succeeded=True),
    "run_failed": lambda machine: machine.ran(FIRST, succeeded=False),
    "dropped": lambda machine: machine.dropped(),
    "forgot": lambda machine: machine.forgot(FIRST),
    "released": lambda machine: machine.released(),
}


def state_of(machine: SegmentMachine) -> object:
    return machine.phase, machine.running, list(machine.waiting), set(machine.results), machine.story


@given(st.lists(st.sampled_from(sorted(EVENTS)), max_size=40))
@example(["ran"])
@example(["requested", "released", "ran", "ran"])
@example(["replay_ahead", "released", "replayed", "replayed"])
def test_an_illegal_event_is_refused_and_changes_nothing(events: list[str]) -> None:
    machine = SegmentMachine()
    for event in events:
        before = state_of(machine)
        is_legal = machine.phase in TRANSITIONS[event]
        is_legal &= event not in {"ran", "run_failed"} or machine.running == FIRST
        is_legal &= event != "forgot" or FIRST in machine.results
        if is_legal:
            EVENTS[event](machine)
        else:
            with pytest.raises(InvalidTransitionError):
                EVENTS[event](machine)
            assert state_of(machine) == before


def test_the_error_carries_the_history_of_the_segment() -> None:
    machine = SegmentMachine()
    machine.replay_ahead()
    machine.requested(FIRST)
    machine.replayed(succeeded=True)
    with pytest.raises(InvalidTransitionError, match=r"(?s)ran\(backward 2\)\. .*READY: run\(backward 1\)$") as caught:
        machine.ran(SECOND, succeeded=True)
    assert caught.value.event == "RUNNING: ran(backward 2)"
    assert caught.value.story == (
        "SAVED: replay_ahead()",
        "REPLAYING: requested(backward 1)",
        "REPLAYING: replayed()",
        "READY: run(backward 1)",
    )


def test_the_history_is_bounded() -> None:
    machine = SegmentMachine()
    for _ in range(MAX_EVENTS):
        machine.requested(FIRST)
    assert len(machine.story) == MAX_EVENTS
    assert machine.story[0] == "SAVED: run(backward 1)"


def test_only_a_replay_that_is_ready_starts_a_speculative_backward() -> None:
    machine = SegmentMachine()
    with pytest.raises(InvalidTransitionError, match="SAVED: speculate"):
        machine.speculate()
    machine.replay_ahead()
    machine.replayed(succeeded=True)
    assert machine.speculate() == [SpeculateBackward()]
    assert machine.requested(FIRST) == []
    assert machine.replayed(succeeded=True) == [Execute(FIRST)]
    assert machine.was_asked
