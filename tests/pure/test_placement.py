from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backhaul._dispatch.placement import CHANGED, FIRST_ARC, SPEED_STEPS, Placement, Ring, parts_by_speed

THIRD = 1 / 3 + 1e-9


def equal(workers: str) -> dict[str, float]:
    return dict.fromkeys(workers, 1.0)


def one_pass(placement: Placement, segments: int, workers: str | Mapping[str, float]) -> str:
    """The worker of each segment of a pass, a dash for the trainer."""
    speeds = equal(workers) if isinstance(workers, str) else workers
    placed = "".join(placement.choose_worker(speeds) or "-" for _ in range(segments))
    placement.backward()
    return placed


def test_first_pass_goes_in_short_arcs() -> None:
    assert one_pass(Placement(), 10, "ab") == "a" * FIRST_ARC + "b" * FIRST_ARC + "aa"


def test_later_passes_give_each_worker_one_contiguous_arc() -> None:
    placement = Placement()
    one_pass(placement, 10, "abc")
    assert one_pass(placement, 10, "cab") == "aaabbbbccc"
    assert one_pass(placement, 10, "abc") == "aaabbbbccc"


def test_more_segments_than_before_go_to_the_last_worker() -> None:
    placement = Placement()
    one_pass(placement, 4, "ab")
    assert one_pass(placement, 6, "ab") == "aabbbb"
    assert one_pass(placement, 6, "ab") == "aaabbb"


def test_one_worker_gets_everything() -> None:
    placement = Placement()
    assert {*one_pass(placement, 9, "a"), *one_pass(placement, 9, "a")} == {"a"}


def test_the_trainers_share_are_the_first_segments() -> None:
    placement = Placement()
    one_pass(placement, 6, "ab")
    placement.begin_block(2)
    assert one_pass(placement, 6, "ab") == "--aabb"
    assert one_pass(placement, 6, "ab") == "--aabb"
    placement.begin_block(9)
    assert one_pass(placement, 6, "ab") == "------"
    placement.begin_block(None)
    assert one_pass(placement, 6, "ab") == "---aab"


def test_the_last_segments_of_one_pass_move_no_other_segment() -> None:
    placement = Placement()
    one_pass(placement, 6, "ab")
    placement.begin_block(1)
    assert one_pass(placement, 6, "ab") == "-aaabb"
    placement.take_last(3)
    assert one_pass(placement, 6, "ab") == "-aa---"
    assert one_pass(placement, 6, "ab") == "-aaabb"
    placement.take_last(9)
    assert placement.is_trainers is True
    assert one_pass(placement, 6, "ab") == "------"
    placement.take_last(9)
    placement.end_block()
    assert one_pass(placement, 6, "ab") == "aaabbb"


def test_faster_workers_get_longer_arcs() -> None:
    placement = Placement()
    one_pass(placement, 8, "ab")
    placement.begin_block(0)
    assert one_pass(placement, 8, {"a": 1.0, "b": 3.0}) == "aabbbbbb"
    assert one_pass(placement, 8, "a") == "aaaaaaaa"  # a worker was lost since
    assert parts_by_speed(5, [1.0, 1.0, 1.0]) == [2, 2, 1]


def test_small_differences_of_speed_move_nothing() -> None:
    placement = Placement()
    one_pass(placement, 16, "ab")
    assert one_pass(placement, 16, {"a": 0.95, "b": 1.0}) == "a" * 8 + "b" * 8
    assert one_pass(placement, 16, {"a": 0.5, "b": 1.0}).count("a") == 5
    assert one_pass(placement, 16, {"a": 0.52, "b": 1.0}).count("a") == 5
    assert one_pass(placement, 16, {"a": 1e-9, "b": 1.0}).count("a") == 16 // (SPEED_STEPS + 1) + 1


def test_a_worker_that_is_lost_within_a_pass_gets_nothing_more() -> None:
    placement = Placement()
    one_pass(placement, 9, "abc")
    first = [placement.choose_worker(equal("abc")) for _ in range(4)]
    rest = [placement.choose_worker(equal("ac")) for _ in range(5)]
    assert first == ["a", "a", "a", "b"]
    assert {*rest} <= {"a", "c"}


def ring_of(workers: int) -> Ring:
    return Ring().changed({f"w{number:02}": 1.0 for number in range(workers)})


@given(st.integers(2, 12), st.lists(st.tuples(st.booleans(), st.integers(0, 99)), max_size=8), st.integers(1, 100))
def test_one_worker_more_or_less_moves_at_most_a_third(
    workers: int, changes: list[tuple[bool, int]], segments: int
) -> None:
    ring, names = ring_of(workers), [f"w{number:02}" for number in range(workers)]
    for number, (is_added, which) in enumerate(changes):
        if is_added or len(names) == 2:
            names.append(f"{which:02} joined {number}")
        else:
            names.pop(which % len(names))
        changed = ring.changed(dict.fromkeys(names, 1.0))
        assert sorted(changed.names) == sorted(names)
        assert ring.moved(changed) <= THIRD
        before, after = ([old_or_new.owner(i, segments) for i in range(segments)] for old_or_new in (ring, changed))
        # Each end of an arc may be rounded to the next segment.
        assert sum(b != a for b, a in zip(before, after, strict=True)) <= 0.35 * segments + len(names)
        ring = changed


@given(st.lists(st.floats(0.1, 10.0), min_size=1, max_size=8), st.integers(1, 200), st.integers(0, 3))
def test_runs_stay_whole_and_follow_the_speeds(speeds: list[float], segments: int, joined: int) -> None:
    by_name = {f"w{number}": speed for number, speed in enumerate(speeds)}
    ring = ring_of(joined + 1).changed(by_name)
    owners = [ring.owner(i, segments) for i in range(segments)]
    cuts = sum(owners[i] != owners[i - 1] for i in range(segments))  # on the ring, where the last meets the first
    assert cuts <= len(speeds) * (len(speeds) > 1)
    for name, speed in by_name.items():
        share = segments * speed / sum(speeds)
        assert abs(owners.count(name) - share) <= max(1.0, 0.1 * share)


@given(st.lists(st.floats(0.5, 2.0), min_size=2, max_size=8), st.randoms())
def test_all_ranks_have_the_same_map(speeds: list[float], random: object) -> None:
    by_name = [(f"w{number}", speed) for number, speed in enumerate(speeds)]
    shuffled = dict(sorted(by_name, key=lambda _: random.random()))  # type: ignore[attr-defined]
    assert Ring().changed(dict(by_name)) == Ring().changed(shuffled)


def test_equal_workers_begin_with_one_arc_each() -> None:
    assert ring_of(4) == Ring(tuple((f"w{number:02}", 0.25) for number in range(4)), 0.0)
    assert ring_of(3).changed(dict.fromkeys(["w00", "w01", "w02"], 1.0)) == ring_of(3)


def test_the_second_and_the_third_worker() -> None:
    alone = Ring().changed(equal("a"))
    assert alone.moved(alone.changed(equal("ab"))) == pytest.approx(1 / 2)
    assert 0 < CHANGED < 1 / SPEED_STEPS
