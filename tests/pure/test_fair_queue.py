from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from backhaul_server.worker.engine.fair_queue import FairQueue, Job


def job(session: str, expected_s: float = 1.0, begin: Callable[[], bool] = lambda: True, *, account: str = "") -> Job:
    return Job(account, session, begin, lambda: None, lambda: None, expected_s, "")


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


def test_credentials_take_turns_however_many_sessions_they_have() -> None:
    queue = FairQueue()
    many = [job(f"many {number % 4}", account="many") for number in range(12)]
    few = [job("few", account="few") for _ in range(3)]
    for item in (*many, *few):
        queue.push(item)
    # A job waits for at most one of each other credential, beside those before it of its own.
    assert [queue.queued_before(item) for item in few] == [1.0, 3.0, 5.0]
    assert [item.account for item in drain(queue)] == ["many", "few"] * 3 + ["many"] * 9


def test_who_asks_again_after_an_answer_waits_for_one_job_of_the_others() -> None:
    queue = FairQueue()
    many = [job("many", account="many") for _ in range(6)]
    for item in many:
        queue.push(item)
    order = []
    queue.push(job("few", account="few"))
    while (running := queue.pop()) is not None:
        order.append(running.account)
        # The answer of a job of `few` leaves when it has ended, so the next request comes while another job runs.
        if len(order) > 1 and order[-2] == "few":
            queue.push(job("few", account="few"))
    assert order[:9] == ["many", "few"] * 4 + ["many"]


def test_new_sessions_come_after_those_that_wait() -> None:
    queue = FairQueue()
    first, waiting, new = job("a"), job("b"), job("c")
    queue.push(first)
    queue.push(waiting)
    assert queue.pop() is first
    queue.push(new)
    assert drain(queue) == [waiting, new]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(1, 5)), max_size=30))
def test_the_work_before_a_job_is_what_then_runs_before_it(pushed: list[tuple[int, int, int]]) -> None:
    queue = FairQueue()
    jobs = [job(f"{account} {session}", cost, account=str(account)) for account, session, cost in pushed]
    for item in jobs:
        queue.push(item)
    expected = {item: queue.queued_before(item) for item in jobs}
    order, before = drain(queue), 0.0
    for item in order:
        assert expected[item] == before
        before += item.expected_s


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
    assert queue.queued_before(first) == 0.0
    assert queue.queued_before(second) == 2.0 + 5.0
    assert queue.queued_before(third) == 2.0 + 5.0 + 3.0
    assert queue.queued_before(job("c")) == 0.0
