import pytest
from hypothesis import given
from hypothesis import strategies as st

from backhaul_server.worker.engine.segment_machine import (
    Answer,
    AnswerError,
    DropReplay,
    ForgetResult,
    Free,
    Key,
    Phase,
    ReplayAhead,
    Run,
    SegmentMachine,
)

FIRST, SECOND = Key("backward", 1), Key("backward", 2)


def test_a_request_runs_and_is_answered() -> None:
    machine = SegmentMachine()
    assert machine.requested(FIRST) == [Run(FIRST)]
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
    assert machine.requested(SECOND) == [ForgetResult(FIRST), Run(SECOND)]


def test_a_failed_request_is_not_remembered() -> None:
    machine = SegmentMachine()
    machine.requested(FIRST)
    assert machine.ran(FIRST, succeeded=False) == [AnswerError(FIRST)]
    assert machine.requested(FIRST) == [Run(FIRST)]


def test_a_replay_ahead_is_used_by_the_request() -> None:
    machine = SegmentMachine()
    assert machine.ahead() == [ReplayAhead()]
    assert machine.ahead() == []
    assert machine.replayed(succeeded=True) == []
    assert machine.phase is Phase.READY
    assert machine.requested(FIRST) == [Run(FIRST)]


def test_a_request_hurries_the_replay_ahead_and_waits_for_it() -> None:
    machine = SegmentMachine()
    machine.ahead()
    assert machine.requested(FIRST) == []
    assert machine.replayed(succeeded=True) == [Run(FIRST)]


@pytest.mark.parametrize("succeeded", [True, False])
def test_a_failed_replay_ahead_leaves_the_error_to_the_request(succeeded: bool) -> None:
    machine = SegmentMachine()
    machine.ahead()
    machine.requested(FIRST)
    machine.replayed(succeeded=False)
    assert machine.ran(FIRST, succeeded=succeeded) == [Answer(FIRST) if succeeded else AnswerError(FIRST)]


def test_a_dropped_replay_is_made_again() -> None:
    machine = SegmentMachine()
    machine.ahead()
    machine.replayed(succeeded=True)
    machine.dropped()
    assert machine.ahead() == [ReplayAhead()]


def test_release_frees_everything_once() -> None:
    machine = SegmentMachine()
    machine.requested(FIRST)
    machine.ran(FIRST, succeeded=True)
    machine.ahead()
    machine.replayed(succeeded=True)
    assert machine.released() == [ForgetResult(FIRST), DropReplay(), Free()]
    assert machine.released() == []
    assert machine.requested(FIRST) == [AnswerError(FIRST)]


def test_release_while_running_drops_what_comes_of_it() -> None:
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

    def carry_out(instructions: list[object]) -> None:
        nonlocal replaying, running, freed
        for instruction in instructions:
            match instruction:
                case ReplayAhead():
                    assert not replaying
                    assert running is None
                    replaying = True
                case Run(key):
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
            joined = machine.phase is not Phase.RELEASED and (key == running or key in machine.waiting)
            asked += [] if joined else [key]
            carry_out(machine.requested(key))
        elif event == "ahead":
            carry_out(machine.ahead())
        elif event == "dropped":
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
