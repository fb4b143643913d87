from backhaul._dispatch.placement import FIRST_RUN, Placement, parts_by_speed


def one_pass(placement: Placement, segments: int, workers: int) -> list[int | None]:
    placed = [placement.choose_worker(workers) for _ in range(segments)]
    placement.backward()
    return placed


def test_first_pass_goes_in_short_runs() -> None:
    assert one_pass(Placement(), 10, 2) == [0] * FIRST_RUN + [1] * FIRST_RUN + [0, 0]


def test_later_passes_give_each_worker_one_contiguous_run() -> None:
    placement = Placement()
    one_pass(placement, 10, 3)
    assert one_pass(placement, 10, 3) == [0] * 4 + [1] * 3 + [2] * 3
    assert one_pass(placement, 10, 3) == [0] * 4 + [1] * 3 + [2] * 3


def test_more_segments_than_before_go_to_the_last_worker() -> None:
    placement = Placement()
    one_pass(placement, 4, 2)
    assert one_pass(placement, 6, 2) == [0, 0, 1, 1, 1, 1]
    assert one_pass(placement, 6, 2) == [0, 0, 0, 1, 1, 1]


def test_one_worker_gets_everything() -> None:
    placement = Placement()
    assert set(one_pass(placement, 9, 1) + one_pass(placement, 9, 1)) == {0}


def test_the_trainers_share_are_the_first_segments() -> None:
    placement = Placement()
    one_pass(placement, 6, 2)
    placement.begin_block((2,))
    assert one_pass(placement, 6, 2) == [None, None, 0, 0, 1, 1]
    assert one_pass(placement, 6, 2) == [None, None, 0, 0, 1, 1]
    placement.begin_block((9,))
    assert one_pass(placement, 6, 2) == [None] * 6
    placement.begin_block(None)
    assert one_pass(placement, 6, 2) == [None, None, None, 0, 0, 1]


def test_a_growing_share_moves_no_segment_to_another_worker() -> None:
    placement = Placement()
    one_pass(placement, 6, 2)
    placement.begin_block((0, 1, 4))
    assert placement.is_trainers is False
    assert one_pass(placement, 6, 2) == [0, 0, 0, 1, 1, 1]
    assert placement.is_trainers is True
    assert one_pass(placement, 6, 2) == [None, 0, 0, 1, 1, 1]
    assert one_pass(placement, 6, 2) == [None, None, None, None, 1, 1]
    assert one_pass(placement, 6, 2) == [None, None, None, None, 1, 1]
    placement.begin_block((0,))
    assert one_pass(placement, 6, 2) == [0, 0, 0, 1, 1, 1]


def test_faster_workers_get_longer_runs() -> None:
    placement = Placement()
    one_pass(placement, 8, 2)
    placement.speeds = [1.0, 3.0]
    assert one_pass(placement, 8, 2) == [0, 0, 1, 1, 1, 1, 1, 1]
    assert one_pass(placement, 8, 1) == [0] * 8  # a worker was lost since
    assert parts_by_speed(5, [1.0, 1.0, 1.0]) == [2, 2, 1]
