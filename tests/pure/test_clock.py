"""The comparison of two clocks: what the bound promises, and what breaks it."""

from math import inf

from hypothesis import given
from hypothesis import strategies as st

from backhaul_runtime.wire.clock import DRIFT, MAX_COMPARISONS, UNKNOWN, ClockOffset


def test_nothing_is_known_before_the_first_answer() -> None:
    assert ClockOffset().estimate(10.0) == UNKNOWN
    assert UNKNOWN.error_s == inf


def test_the_quickest_answer_tells_how_far_a_clock_is_ahead() -> None:
    clock = ClockOffset()
    clock.compare(10.0, 515.0, 20.0)
    clock.compare(30.0, 535.25, 30.5)
    clock.compare(40.0, 546.5, 42.0)
    offset_s, error_s, round_trip_s = clock.estimate(42.0)
    assert (offset_s, round_trip_s) == (505.0, 0.5)
    assert error_s == 0.25 + DRIFT * 11.5


def test_a_new_answer_replaces_a_quicker_one_that_has_become_too_old() -> None:
    clock = ClockOffset()
    clock.compare(0.0, 100.0005, 0.001)
    clock.compare(60.0, 160.0015, 60.004)
    offset_s, error_s, round_trip_s = clock.estimate(60.004)
    assert abs(error_s - 0.002) < 1e-9
    assert abs(offset_s - 99.9995) < 1e-9
    assert round_trip_s == 0.001


def test_answers_from_before_a_clock_was_set_are_dropped() -> None:
    clock = ClockOffset()
    clock.compare(0.0, 100.0005, 0.001)
    clock.compare(1.0, 4_601.1, 1.2)  # their clock was set an hour ahead
    assert abs(clock.estimate(1.2).offset_s - 4_600) < 1e-9
    clock.compare(5.0, 4_605.0, 4.0)  # ours was set back while the answer was on its way
    assert clock.estimate(5.0) == UNKNOWN


@given(
    offset_s=st.floats(-1e6, 1e6),
    drift=st.floats(-DRIFT, DRIFT),
    ways=st.lists(st.tuples(st.floats(0, 0.5), st.floats(0, 0.5), st.floats(0, 30)), min_size=1, max_size=100),
)
def test_the_true_offset_is_always_within_the_bound(
    offset_s: float, drift: float, ways: list[tuple[float, float, float]]
) -> None:
    clock, now_s = ClockOffset(), 1_000.0
    for up_s, down_s, pause_s in ways:
        theirs_s = (now_s + up_s) * (1 + drift) + offset_s
        clock.compare(now_s, theirs_s, now_s + up_s + down_s)
        now_s += up_s + down_s
        estimate = clock.estimate(now_s)
        true_s = now_s * drift + offset_s
        # What their clock drifts during a round trip is not in the bound.
        assert abs(estimate.offset_s - true_s) <= estimate.error_s + DRIFT * (up_s + down_s) + 1e-6
        now_s += pause_s
    assert len(clock._comparisons) <= MAX_COMPARISONS
