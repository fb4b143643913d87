"""What a worker does ahead, and what gives way: decided without a worker."""

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backhaul_runtime.replay.schedule import Footprint, Key, Schedule, ScheduledWork

SIZE = Footprint(replay_bytes=12, ready_bytes=10, backward_bytes=14)


def saved(schedule: Schedule, numbers: Iterable[int], session: str = "a", footprint: Footprint = SIZE) -> None:
    for number in numbers:
        schedule.saved((session, number), footprint)
        schedule.expected((session, number))


def replay_all(schedule: Schedule, room_bytes: int) -> list[int]:
    """Replays ahead what there is to replay. Returns which segments, in order."""
    done = []
    while (step := schedule.next(room_bytes)) is not None:
        replay(schedule, step)
        done.append(step.key[1])
    return done


def replay(schedule: Schedule, step: ScheduledWork, footprint: Footprint = SIZE) -> None:
    for key in step.evicts:
        schedule.dropped(key)
    schedule.started(step.key)
    schedule.ready(step.key, footprint.ready_bytes)


def ready(schedule: Schedule, room_bytes: int = 10**6) -> list[Key]:
    """What is ready, the first to give way first."""
    dropped_keys = []
    while schedule.held_bytes:
        dropped_keys.append(schedule.last_needed())
        schedule.dropped(dropped_keys[-1])
    return dropped_keys


def pass_of(schedule: Schedule, numbers: list[int]) -> None:
    """A forward and backward without any work ahead."""
    saved(schedule, numbers)
    for number in reversed(numbers):
        schedule.requested(("a", number))
    for number in numbers:
        schedule.released(("a", number))


def test_forward_has_segments_replayed_as_they_were_saved() -> None:
    schedule = Schedule()
    saved(schedule, [1, 2, 3])
    assert replay_all(schedule, 100) == [1, 2, 3]


def test_backward_has_them_replayed_in_the_order_of_need() -> None:
    schedule = Schedule()
    saved(schedule, [1, 2, 3, 4])
    schedule.requested(("a", 4))
    assert replay_all(schedule, 100) == [3, 2, 1]


def test_what_is_needed_last_gives_way_to_what_is_saved_later() -> None:
    schedule = Schedule()
    for number in [1, 2, 3]:
        saved(schedule, [number])
        replay_all(schedule, 24)  # two, and what a run takes beside
    assert ready(schedule) == [("a", 2), ("a", 3)]


def test_nothing_is_replayed_that_would_give_way_to_what_the_last_pass_saved() -> None:
    schedule = Schedule()
    pass_of(schedule, [1, 2, 3, 4])
    done = []
    for number in [11, 12, 13, 14]:
        saved(schedule, [number])
        done += replay_all(schedule, 24)
    assert done == [13, 14]


def test_room_is_left_for_the_tensors_of_what_the_last_pass_saved() -> None:
    schedule = Schedule()
    done: list[int] = []
    for turn in (0, 10):
        done.clear()
        for number in range(turn, turn + 4):
            schedule.saved(("a", number), SIZE, source_bytes=10)
            schedule.expected(("a", number))
            done += replay_all(schedule, 24 + 10 * (turn + 3 - number))  # what is not saved yet leaves room
        for number in reversed(range(turn, turn + 4)):
            schedule.requested(("a", number))
            schedule.started(("a", number))
            schedule.released(("a", number))
    assert done == [12, 13]


def test_a_forward_without_a_backward_says_nothing_of_the_next() -> None:
    schedule = Schedule()
    pass_of(schedule, [1, 2])
    saved(schedule, [3])
    schedule.released(("a", 3))
    saved(schedule, [4])
    assert replay_all(schedule, 24) == [4]
    assert schedule.next(14) is None


def test_a_shorter_pass_than_the_last_is_replayed_once_backward_shows_it() -> None:
    schedule = Schedule()
    pass_of(schedule, [1, 2, 3, 4])
    saved(schedule, [11, 12])
    assert replay_all(schedule, 24) == []
    schedule.requested(("a", 12))
    assert replay_all(schedule, 24) == [11]


def test_backward_goes_on_with_the_room_of_what_it_has_used() -> None:
    schedule = Schedule()
    saved(schedule, [1, 2, 3, 4])
    done = []
    for number in [4, 3, 2, 1]:
        done += replay_all(schedule, 24)
        schedule.requested(("a", number))
        schedule.started(("a", number))
    assert done == [3, 4, 2, 1]


def test_segments_saved_after_the_one_that_backward_reached_come_last() -> None:
    schedule = Schedule()
    saved(schedule, [1, 2, 3, 4])
    schedule.requested(("a", 2))
    assert replay_all(schedule, 100) == [1, 4, 3]
    assert ready(schedule) == [("a", 3), ("a", 4), ("a", 1)]


def test_what_the_trainer_has_announced_comes_first_also_while_forward_runs() -> None:
    schedule = Schedule()
    saved(schedule, [1, 2, 3])
    schedule.requested(("a", 3))
    schedule.announced("a", [2, 1, 7])
    saved(schedule, [4, 5])  # a later forward runs beside the backward
    assert replay_all(schedule, 24) == [2, 1]
    assert replay_all(schedule, 100) == [4, 5]
    assert ready(schedule) == [("a", 4), ("a", 5), ("a", 1), ("a", 2)]


def test_the_last_announcement_counts() -> None:
    schedule = Schedule()
    saved(schedule, [1, 2, 3])
    schedule.announced("a", [1, 3])
    schedule.released(("a", 1))
    schedule.announced("a", [3, 2])
    schedule.announced("unknown", [1])
    assert replay_all(schedule, 100) == [3, 2]


def test_a_speculative_backward_is_run_before_replays_of_what_is_needed_later() -> None:
    schedule = Schedule()
    saved(schedule, [1, 2, 3])
    schedule.requested(("a", 3))
    replay(schedule, schedule.next(100))  # type: ignore[arg-type]
    schedule.backward_predicted(("a", 2))
    assert schedule.next(100) == ScheduledWork(("a", 2), ())
    schedule.started(("a", 2))
    schedule.ready(("a", 2), 5, is_done=True)
    assert schedule.next(100) == ScheduledWork(("a", 1), ())
    assert schedule.held_bytes == 5


def test_what_failed_is_not_tried_again_until_it_is_wanted() -> None:
    schedule = Schedule()
    saved(schedule, [1])
    schedule.abandoned(("a", 1))
    assert schedule.next(100) is None
    schedule.expected(("a", 1))
    assert schedule.next(100) == ScheduledWork(("a", 1), ())


def test_what_was_given_up_for_room_is_made_again_when_there_is_room() -> None:
    schedule = Schedule()
    saved(schedule, [1])
    replay_all(schedule, 100)
    schedule.dropped(("a", 1))
    assert schedule.next(13) is None
    assert schedule.next(14) == ScheduledWork(("a", 1), ())


def test_sessions_take_turns_and_share_the_room() -> None:
    schedule = Schedule()
    saved(schedule, range(8), "a")
    replay_all(schedule, 84)
    assert schedule.held_bytes == 80
    saved(schedule, range(8), "b")
    done = replay_all(schedule, 84)
    assert sorted(done) == [5, 6, 7]
    assert [session for session, _ in ready(schedule)].count("b") == 3
    assert replay_all(schedule, 0) == []


def test_room_is_taken_from_the_session_that_holds_most() -> None:
    schedule = Schedule()
    saved(schedule, [1, 2, 3], "a")
    saved(schedule, [1], "b")
    replay_all(schedule, 100)
    assert schedule.last_needed() == ("a", 1)


@pytest.mark.parametrize("event", ["started", "dropped"])
def test_what_runs_or_is_given_up_is_no_longer_counted(event: str) -> None:
    schedule = Schedule()
    saved(schedule, [1, 2])
    replay_all(schedule, 100)
    getattr(schedule, event)(("a", 2))
    assert schedule.held_bytes == 10
    schedule.released(("a", 1))
    assert schedule.held_bytes == 0
    schedule.closed("a")
    assert schedule.next(100) is None


footprints = st.tuples(st.integers(0, 20), st.integers(0, 20), st.integers(0, 20)).map(
    lambda sizes: Footprint(sizes[0] + sizes[1], sizes[1], sizes[1] + sizes[2])
)
events = st.tuples(st.sampled_from("ssssdrnnnnng"), st.sampled_from("ab"), footprints)


@given(st.lists(events, max_size=60), st.integers(40, 120))
def test_never_above_the_room_and_always_in_order_of_need(steps: list[tuple[str, str, Footprint]], room: int) -> None:
    schedule = Schedule()
    alive: dict[str, dict[int, Footprint]] = {"a": {}, "b": {}}
    holds: dict[Key, int] = {}
    for number, (kind, session, footprint) in enumerate(steps):
        own = alive[session]
        if kind == "s":
            own[number] = footprint
            saved(schedule, [number], session, footprint)
        elif kind == "d" and own:
            schedule.requested((session, max(own)))
            schedule.started((session, max(own)))
            holds.pop((session, max(own)), None)
        elif kind == "r" and own:
            schedule.released((session, max(own)))
            holds.pop((session, max(own)), None)
            del own[max(own)]
        elif kind == "g" and own:
            schedule.backward_predicted((session, max(own)))
        elif kind == "n" and (step := schedule.next(room)) is not None:
            for key in step.evicts:
                schedule.dropped(key)
                del holds[key]
            started = alive[str(step.key[0])][step.key[1]]
            in_use = started.execution_bytes if step.key in holds else started.replay_bytes
            holds.pop(step.key, None)
            assert sum(holds.values()) + in_use <= room
            schedule.started(step.key)
            schedule.ready(step.key, started.ready_bytes)
            holds[step.key] = started.ready_bytes
        assert schedule.held_bytes == sum(holds.values())


@given(st.lists(footprints, min_size=1, max_size=10), st.integers(40, 200))
def test_a_pass_known_beforehand_wastes_nothing(pass_footprints: list[Footprint], room: int) -> None:
    schedule = Schedule()
    for turn in range(2):
        replayed = []
        for number, footprint in enumerate(pass_footprints, start=turn * len(pass_footprints)):
            saved(schedule, [number], "a", footprint)
            while (step := schedule.next(room)) is not None:
                assert turn == 0 or not step.evicts, step
                replay(schedule, step, pass_footprints[step.key[1] % len(pass_footprints)])
                replayed.append(step.key[1])
        for number in reversed(range(turn * len(pass_footprints), (turn + 1) * len(pass_footprints))):
            schedule.requested(("a", number))
            schedule.started(("a", number))
            schedule.released(("a", number))
    assert len(replayed) == len(set(replayed))
