"""NOTE [Possession]: what sessions may name of a store that they share, and what their credentials may keep."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backhaul import BudgetError, TransferError
from backhaul_server.worker.accounts import Account, Quotas
from backhaul_server.worker.engine.store import ENTRY_BYTES, OWNER_BYTES, Store
from pure.test_store import OWNER, A, B, Tenant, filled


def test_no_session_receives_a_tensor_that_another_made_to_collide() -> None:
    store = filled(2000, a=10)
    store.expect(OWNER, 10)
    with pytest.raises(TransferError, match="another session"):
        store.arrived(B, b"a", "forged", 10)
    store.cache(B, b"a", "forged", 10)
    assert store.missing(B, [b"a"]) == [b"a"]
    assert (store.value(OWNER, b"a"), store.usage().cached) == ("a", 10)
    store.expect(OWNER, 10)
    store.arrived(B, b"a", "a", 10)
    assert store.missing(B, [b"a"]) == []


def equal(budget: int, *owners: Tenant, size: int = ENTRY_BYTES) -> Store[str]:
    """Returns a store to which each of these owners has sent the same tensor."""
    store: Store[str] = Store(budget)
    for owner in owners:
        store.expect(owner, size)
        store.arrived(owner, b"w", "tensor", size)
    return store


def test_equal_tensors_of_several_owners_are_stored_once() -> None:
    store = equal(1 << 20, A, B)
    assert store.usage().cached == ENTRY_BYTES + OWNER_BYTES
    assert [store.missing(owner, [b"w"]) for owner in (A, B, Tenant("c"))] == [[], [], [b"w"]]


def test_a_tensor_of_another_owner_is_reported_as_missing() -> None:
    store = equal(1 << 20, A)
    store.attach("s", A, [b"w"], [], 0)
    assert store.missing(B, [b"w", b"x"]) == [b"w", b"x"]
    assert not store.is_named(B, b"w")
    store.disown(B, [b"w"])
    store.remove_owner(B)
    assert store.missing(A, [b"w"]) == []


def test_a_tensor_that_one_owner_disowns_stays_for_the_other() -> None:
    store = equal(1 << 20, A, B)
    store.disown(A, [b"w"])
    assert [store.missing(owner, [b"w"]) for owner in (A, B)] == [[b"w"], []]
    assert store.usage().cached == ENTRY_BYTES
    store.remove_owner(B)
    assert store.usage().cached == 0


def test_a_segment_keeps_disowned_tensors_until_it_is_detached() -> None:
    store = equal(1 << 20, A)
    store.attach("s", A, [b"w"], [], 0)
    store.disown(A, [b"w"])
    assert store.missing(A, [b"w"]) == []
    store.detach("s")
    assert store.missing(A, [b"w"]) == [b"w"]
    assert store.usage().cached == 0


def test_a_tensor_that_is_transient_for_one_owner_stays_for_the_other() -> None:
    store = equal(1 << 20, A, B)
    store.attach("s", A, [b"w"], [b"w"], 0)
    store.attach("t", B, [b"w"], [], 0)
    store.detach("t")
    store.detach("s")
    assert [store.missing(owner, [b"w"]) for owner in (A, B)] == [[b"w"], []]
    assert (store.usage().segments, store.usage().cached) == (0, ENTRY_BYTES)


def test_an_evicted_tensor_is_missing_for_all_owners() -> None:
    store = equal(4 * ENTRY_BYTES, A, B)
    store.expect(OWNER, 4 * ENTRY_BYTES)
    assert [store.missing(owner, [b"w"]) for owner in (A, B)] == [[b"w"], [b"w"]]
    assert store.usage().cached == 4 * ENTRY_BYTES


def test_an_owner_may_be_removed_while_its_tensors_are_sent() -> None:
    store = equal(1 << 20, A)
    store.attach("answer", A, [b"w"], [b"w"], 0)
    store.remove_owner(A)
    assert store.value(OWNER, b"w") == "tensor"
    store.detach("answer")
    assert store.usage().cached == store.usage().segments == 0
    assert store._owners == {}


@given(st.lists(st.tuples(st.sampled_from("pPaAdgl"), st.integers(0, 3), st.integers(0, 3)), max_size=80))
def test_possessions_and_bytes_always_agree(steps: list[tuple[str, int, int]]) -> None:
    """Whatever two owners do, each names only what it has sent, and nothing is left of removed owners."""
    store: Store[int] = Store(20 * ENTRY_BYTES)
    held, inflight = A.account.held_bytes, A.account.inflight_bytes
    attached: dict[tuple[int, Tenant], int] = {}
    sent: dict[Tenant, set[bytes]] = {A: set(), B: set()}
    for kind, number, other in steps:
        owner, name = (A, B)[other % 2], bytes([number])
        if kind in "pP":
            store.expect(owner, ENTRY_BYTES)
            store.arrived(owner, name, number, ENTRY_BYTES)
            sent[owner].add(name)
        elif kind in "aA" and not store.missing(owner, [name]) and (number, owner) not in attached:
            store.attach((number, owner), owner, [name], [name] if kind == "A" else [], other)
            attached[number, owner] = other
        elif kind == "d" and (number, owner) in attached:
            del attached[number, owner]
            store.detach((number, owner))
        elif kind == "g":
            store.disown(owner, [name])
        elif kind == "l":
            for key in [key for key in attached if key[1] == owner]:
                del attached[key]
                store.detach(key)
            store.remove_owner(owner)
            sent[owner].clear()
        for owner, names in sent.items():
            assert {bytes([n]) for n in range(4)} - set(store.missing(owner, [bytes([n]) for n in range(4)])) <= names
            assert all(store.is_named(owner, bytes([n])) == ((n, owner) in attached) for n in range(4))
    for key in attached:
        store.detach(key)
    for owner in (A, B):
        store.remove_owner(owner)
    assert (store._entries, store._owners) == ({}, {})
    assert sum(store._bytes.values()) == 0
    assert (A.account.held_bytes, A.account.inflight_bytes) == (held, inflight)


class Other(Tenant):
    """A session of another credential."""

    __slots__ = ()
    account = Account("other")


def test_credentials_share_nothing() -> None:
    store = equal(1 << 20, A, Other("x"))
    assert store.usage().cached == 2 * ENTRY_BYTES
    store.expect(Other("x"), 10)
    store.arrived(Other("x"), b"v", "one", 10)
    store.expect(A, 10)
    store.arrived(A, b"v", "another", 10)  # the same address: it collides with nothing
    assert (store.value(Other("x"), b"v"), store.value(A, b"v")) == ("one", "another")


def limited(quotas: Quotas) -> Tenant:
    """Returns a session of a credential of its own with these quotas."""

    class Limited(Tenant):
        __slots__ = ()
        account = Account("limited", quotas)

    return Limited("limited")


def test_a_quota_of_memory_bounds_what_cannot_be_evicted() -> None:
    store: Store[str] = Store(1000)
    owner = limited(Quotas(memory_bytes=100))
    for name in (b"a", b"b"):
        store.expect(owner, 60)
        store.arrived(owner, name, "tensor", 60)  # cached, so it can be evicted
    store.attach("s", owner, [b"a"], [], 0)
    with pytest.raises(BudgetError, match='"limited" may keep 100 bytes') as caught:
        store.attach("t", owner, [b"b"], [], 0)
    assert caught.value.retry_after_s > 0
    with pytest.raises(BudgetError, match="may keep") as caught:
        store.expect(owner, 101)
    assert caught.value.retry_after_s == 0
    assert not store.keep_sums(owner, 50)
    assert store.keep_sums(owner, 40)
    with pytest.raises(BudgetError, match="may keep"):
        store.charge(owner, "a session", 1)
    store.attach("u", OWNER, [], [], 0, own_bytes=500)  # others have their own
    store.drop_sums(owner, 40)
    store.detach("s")
    store.attach("t", owner, [b"b"], [], 0)


def test_a_quota_of_bytes_in_flight_lets_a_single_answer_pass() -> None:
    store: Store[str] = Store(1000)
    owner = limited(Quotas(inflight_bytes=100))
    store.start_sending(owner, 300)
    with pytest.raises(BudgetError, match="have in flight"):
        store.start_sending(owner, 1)
    with pytest.raises(BudgetError, match="have in flight"):
        store.expect(owner, 1)
    store.start_sending(OWNER, 100)
    store.end_sending(owner, 300)
    store.expect(owner, 100)
