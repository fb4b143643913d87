from collections.abc import Callable

from backhaul_server.worker.engine.fair_queue import FairQueue, Job


def job(session: str, expected_s: float = 1.0, begin: Callable[[], bool] = lambda: True) -> Job:
    return Job(session, begin, lambda: None, lambda: None, expected_s, "")


def drain(queue: FairQueue) -> list[Job]:
    jobs = []
    while (next_job := queue.pop()) is not None:
        jobs.append(next_job)
    return jobs


def test_sessions_take_turns_each_in_its_own_order() -> None:
    queue = FairQueue()
    jobs = {name: job(name[0]) for name in ("a1", "a2", "a3", "b1", "c1", "c2")}
    for item in jobs.values():
        queue.push(item)
    order = drain(queue)
    assert [next(n for n, j in jobs.items() if j is item) for item in order] == ["a1", "b1", "c1", "a2", "c2", "a3"]
    assert len(queue) == 0


def test_a_job_that_cannot_begin_is_skipped_and_keeps_its_turn() -> None:
    queue = FairQueue()
    has_room = False
    large, behind, other = job("a", begin=lambda: has_room), job("a"), job("b")
    for item in (large, behind, other):
        queue.push(item)
    assert queue.pop() is other
    queue.push(last := job("b"))
    has_room = True
    assert drain(queue) == [large, last, behind]


def test_the_work_queued_before_a_job_is_known() -> None:
    queue = FairQueue()
    first, second, other, third = job("a", 2.0), job("a", 3.0), job("b", 5.0), job("b", 7.0)
    for item in (first, second, other, third):
        queue.push(item)
    assert queue.queued_before(first) == 5.0
    assert queue.queued_before(second) == 2.0 + 5.0 + 7.0
    assert queue.queued_before(job("c")) == 0.0
