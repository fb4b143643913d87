"""What a store keeps within its budget, and what it evicts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backhaul import BudgetError
from backhaul_server.worker.accounts import Account
from backhaul_server.worker.engine.store import Store


class Tenant(str):
    """A session, named by its id. All belong to one credential."""

    __slots__ = ()
    account = Account("all")

    @property
    def id(self) -> str:
        return self


OWNER, A, B = map(Tenant, ("a session", "a", "b"))


def filled(budget: int, **tensors: int) -> Store[str]:
    store: Store[str] = Store(budget)
    for name, size in tensors.items():
        store.expect(OWNER, size)
        store.arrived(OWNER, name.encode(), name, size)
    return store


def test_tensors_are_cached_until_a_segment_names_them() -> None:
    store = filled(100, a=10, b=20)
    assert store.missing(OWNER, [b"a", b"c", b"c"]) == [b"c"]
    store.attach("s", OWNER, [b"a"], [], 5)
    assert (store.usage().segments, store.usage().cached) == (10, 20)
    store.detach("s")
    assert (store.usage().segments, store.usage().cached) == (0, 30)


def test_transient_tensors_are_freed_with_their_last_segment() -> None:
    store = filled(100, x=10)
    store.attach("s", OWNER, [b"x"], [b"x"], 0)
    store.attach("t", OWNER, [b"x", b"x"], [b"x"], 0)
    store.detach("s")
    assert store.value(OWNER, b"x") == "x"
    store.detach("t")
    assert store.missing(OWNER, [b"x"]) == [b"x"]
    assert store.usage().cached == 0


def test_the_oldest_cached_tensors_are_evicted_first() -> None:
    store = filled(30, a=10, b=10, c=10)
    store.value(OWNER, b"a")
    store.expect(OWNER, 10)
    assert store.missing(OWNER, [b"a", b"b", b"c"]) == [b"b"]


def test_a_tensor_is_charged_when_it_is_declared() -> None:
    store: Store[str] = Store(100)
    store.expect(OWNER, 90)
    with pytest.raises(BudgetError):
        store.expect(OWNER, 20)
    store.abandon(OWNER, 90)
    store.expect(OWNER, 20)


def test_a_tensor_beyond_the_whole_budget_will_never_fit() -> None:
    with pytest.raises(BudgetError, match="--memory") as caught:
        Store(100).expect(OWNER, 101)
    assert (caught.value.retry_after_s, caught.value.budget_bytes, caught.value.needed_bytes) == (0.0, 100, 101)


def test_a_segment_is_accepted_only_with_room_for_the_largest_execution() -> None:
    store = filled(100, a=30, b=30)
    store.attach("s", OWNER, [b"a"], [], 50)
    with pytest.raises(BudgetError) as caught:
        store.attach("t", OWNER, [b"b"], [], 10)
    assert caught.value.retry_after_s > 0
    store.detach("s")
    store.attach("t", OWNER, [b"b"], [], 10)


def test_a_segment_that_does_not_fit_alone_is_refused_for_good() -> None:
    store = filled(100, a=60)
    with pytest.raises(BudgetError) as caught:
        store.attach("s", OWNER, [b"a"], [], 50)
    assert caught.value.retry_after_s == 0.0
    assert store.usage().refusals == 1


def test_an_execution_makes_room_among_replays_and_results() -> None:
    store = filled(100, a=10, b=10)
    dropped: list[str] = []
    store.attach("s", OWNER, [b"a"], [], 40)
    store.attach("t", OWNER, [b"b"], [], 40)
    store.keep_ready("s", 30, lambda: dropped.append("s"))
    store.keep_result("r", 30, lambda: dropped.append("r"))
    assert store.start_execution("t") == 40
    assert dropped == ["s"]
    store.keep_result("q", 40, lambda: dropped.append("q"))
    assert dropped == ["s", "r"]
    assert store.usage().working == 40
    store.end_execution(40)
    assert store.usage().working == 0


def test_an_execution_takes_over_what_is_ready_for_it() -> None:
    store = filled(100, a=10)
    store.attach("s", OWNER, [b"a"], [], 80)
    store.keep_ready("s", 60, pytest.fail)
    assert store.start_execution("s", 70) == 70
    assert store.usage().working == 70


def test_an_execution_that_begins_takes_its_replay_away_from_the_schedule_before_room_is_made() -> None:
    store = filled(100, a=10, b=30)
    replays = ["t", "s"]
    store.last_needed = lambda: replays[-1]
    store.attach("s", OWNER, [b"a"], [], 60)
    for name, size in (("t", 10), ("s", 40)):
        store.keep_ready(name, size, lambda name=name: replays.remove(name))  # type: ignore[misc]
    assert store.start_execution("s", 60, lambda: replays.remove("s")) == 60
    assert (replays, store.missing(OWNER, [b"b"])) == ([], [])


def test_the_schedule_chooses_the_replay_to_evict() -> None:
    dropped: list[str] = []
    store: Store[str] = Store(100, lambda: next(name for name in "bac" if name not in dropped))
    for name in "abc":
        store.keep_ready(name, 30, lambda name=name: dropped.append(name))  # type: ignore[misc]
    store.expect(OWNER, 50)
    assert dropped == ["b", "a"]
    assert store.usage().working == 30


def test_tensors_are_accepted_beside_replays_but_not_beside_an_execution() -> None:
    store = filled(100, a=10)
    store.attach("s", OWNER, [b"a"], [], 50)
    store.keep_ready("s", 50, pytest.fail)
    store.expect(OWNER, 40)
    with pytest.raises(BudgetError):
        store.expect(OWNER, 1)


def test_tensors_for_an_unsaved_segment_are_evicted_after_replays() -> None:
    store = filled(100, a=10, b=10)
    store.attach("s", OWNER, [b"a"], [], 20)
    store.detach("s")
    dropped: list[str] = []
    store.keep_ready("s", 60, lambda: dropped.append("s"))
    store.expect(OWNER, 30)
    assert (store.missing(OWNER, [b"a", b"b"]), dropped) == ([b"a"], [])
    store.expect(OWNER, 30)
    assert (store.missing(OWNER, [b"a", b"b"]), dropped) == ([b"a"], ["s"])


def test_a_computed_tensor_evicts_cached_ones_but_none_that_an_unsaved_segment_needs() -> None:
    store = filled(100, cached=40)
    store.attach("s", OWNER, [b"cached"], [], 0)
    store.detach("s")
    store.expect(OWNER, 50)
    store.arrived(OWNER, b"awaited", "awaited", 50)

    store.cache(OWNER, b"small", "small", 30)
    assert store.missing(OWNER, [b"cached", b"awaited", b"small"]) == [b"cached"]

    store.cache(OWNER, b"large", "large", 60)
    assert store.missing(OWNER, [b"awaited", b"large"]) == [b"large"]


def test_an_execution_waits_for_an_answer_that_is_being_sent() -> None:
    store = filled(100, a=10)
    store.attach("s", OWNER, [b"a"], [], 50)
    store.keep_result("r", 60, lambda: None)
    store.pin_result("r")
    assert store.start_execution("s") is None
    store.unpin_result("r")
    assert store.start_execution("s") == 50
    assert store.usage().results == 0


def test_an_execution_of_a_released_segment_charges_nothing() -> None:
    store = filled(100, a=10)
    store.attach("s", OWNER, [b"a"], [], 50)
    store.detach("s")
    assert store.start_execution("s") == 0


@given(st.lists(st.tuples(st.sampled_from("pasdrefux"), st.integers(0, 5), st.integers(0, 60)), max_size=60))
def test_nothing_ever_exceeds_the_budget(steps: list[tuple[str, int, int]]) -> None:
    store: Store[int] = Store(100)
    running: list[tuple[int, int]] = []
    pinned: list[int] = []
    for kind, number, size in steps:
        name = bytes([number])
        try:
            if kind == "p" and store.missing(OWNER, [name]):
                store.expect(OWNER, size)
                store.arrived(OWNER, name, number, size)
            elif kind == "a" and not store.missing(OWNER, [name]) and number not in store._segments:
                store.attach(number, OWNER, [name], [name] if size % 2 else [], size)
            elif kind == "d" and number in store._segments:
                store.free_ready(number)
                store.detach(number)
            elif kind in "rs" and number in store._segments and not running:
                taken = store.start_execution(number, size)
                assert taken is not None or pinned, "only an answer that is being sent is waited for"
                if taken is not None:
                    running.append((number, taken))
            elif kind == "e" and running:
                segment, taken = running.pop()
                store.end_execution(taken)
                if segment in store._segments:
                    store.keep_ready(segment, min(size, taken), lambda: None)
            elif kind == "f" and running:
                _, taken = running.pop()
                store.end_execution(taken)
                store.forget_result(number)
                if number not in pinned:
                    store.keep_result(number, min(size, taken), lambda: None)
                    store.pin_result(number)
                    pinned.append(number)
            elif kind == "u" and pinned:
                store.unpin_result(pinned.pop())
        except BudgetError:
            pass
        usage = store.usage()
        held = (usage.segments, usage.cached, usage.working, usage.results)
        assert min(held) >= 0
        assert sum(held) <= 100


def test_a_segment_is_not_accepted_beside_an_execution_that_another_would_need() -> None:
    store = filled(1000, b=300)
    store.attach("a", OWNER, [], [], 800)
    store.attach("c", OWNER, [], [], 100)
    store.start_execution("c")
    with pytest.raises(BudgetError):
        store.attach("b", OWNER, [b"b"], [], 10)


def test_a_result_that_is_being_read_stays_charged() -> None:
    store: Store[str] = Store(100)
    store.keep_result("r", 60, lambda: None)
    store.pin_result("r")
    with pytest.raises(BudgetError):
        store.expect(OWNER, 50)
    store.forget_result("r")
    assert store.usage().results == 60
    store.unpin_result("r")
    assert store.usage().results == 0
    store.expect(OWNER, 50)


def test_a_result_that_replaces_one_that_is_being_read_leaves_no_charge() -> None:
    store: Store[str] = Store(100)
    store.keep_result("r", 30, lambda: None)
    store.pin_result("r")
    store.forget_result("r")
    store.keep_result("r", 30, lambda: None)
    assert store.usage().results == 60
    store.unpin_result("r")
    store.forget_result("r")
    assert store.usage().results == 0
    store.keep_result("other", 100, lambda: None)


def test_free_shared_memory_is_charged() -> None:
    free = 0
    store: Store[str] = Store(100, free_shared_bytes=lambda: free)
    assert store.has_room(60)
    free = 60
    store.expect(OWNER, 20)
    free -= 20  # the tensor lies in shared memory
    store.arrived(OWNER, b"shared", "tensor", 20, is_shared=True)
    store.cache(OWNER, b"own", "tensor", 30)
    assert store.usage().cached == 90
    assert not store.has_room(11)
    # Evicting a tensor in shared memory makes no room; evicting the other one does.
    store.expect(OWNER, 40)
    assert store.missing(OWNER, [b"shared", b"own"]) == [b"own"]
    with pytest.raises(BudgetError):
        store.expect(OWNER, 1)
    store.abandon(OWNER, 40)
    assert store.attach("segment", OWNER, [b"shared"], [b"shared"], 40) == 20
    store.detach("segment")
    free += 20
    assert store.usage().cached == 60
    assert store.room_for_replays() == 40


def test_a_copy_replaces_a_tensor_in_shared_memory() -> None:
    free = 30
    store: Store[str] = Store(100, free_shared_bytes=lambda: free)
    store.expect(OWNER, 20)
    store.arrived(OWNER, b"a", (shared := "tensor"), 20, is_shared=True)
    assert store.oldest_shared(lambda tensor: tensor is shared) == ((OWNER.account, b"a"), shared)
    store.replace((OWNER.account, b"a"), shared, "copy")
    free += 20
    store.expect(OWNER, 50)  # the copy can be evicted
    assert store.missing(OWNER, [b"a"]) == [b"a"]


def test_a_segment_itself_is_charged() -> None:
    store = filled(100, a=10)
    store.attach("s", OWNER, [b"a"], [], 0, own_bytes=30)
    assert store.usage().segments == 40
    store.resize("s", 20)
    assert store.usage().segments == 30
    with pytest.raises(BudgetError):
        store.resize("s", 91)
    store.detach("s")
    assert store.usage().segments == 0


def test_attaching_a_segment_does_not_evict_the_tensors_it_names() -> None:
    store = filled(100, a=40, b=40)
    store.attach("s", OWNER, [b"a"], [], 0, own_bytes=50)
    assert store.missing(OWNER, [b"a", b"b"]) == [b"b"]


def test_one_answer_is_always_sent_and_others_if_there_is_room() -> None:
    store: Store[str] = Store(100)
    store.charge(OWNER, "everything", 100)
    store.start_sending(OWNER, 30)
    with pytest.raises(BudgetError):
        store.start_sending(OWNER, 30)
    store.end_sending(OWNER, 30)
    store.start_sending(OWNER, 30)
