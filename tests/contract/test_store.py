"""The store's contract, run against each implementation: what the daemon relies on, and no more."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from flashrecd.store.base import Conflict, Entry, Lease, Store
from flashrecd.store.embedded import EmbeddedStore

IMPLEMENTATIONS: list[Callable[[], Store]] = [EmbeddedStore]


@pytest.fixture(params=IMPLEMENTATIONS, ids=lambda make: str(make.__name__))
def store(request: pytest.FixtureRequest) -> Store:
    made: Store = request.param()
    return made


def test_a_key_that_was_never_written(store: Store) -> None:
    assert store.get("a") is None
    assert store.keys("") == []
    store.delete("a")


def test_the_newest_value_is_read_back(store: Store) -> None:
    first = store.put("a", b"1", None)
    second = store.put("a", b"2", None)
    assert store.get("a") == second == Entry(b"2", second.revision)
    assert second.revision > first.revision > 0


def test_a_value_is_the_stores_own(store: Store) -> None:
    value = bytearray(b"1")
    store.put("a", value, None)
    value[0] = 0
    entry = store.get("a")
    assert entry is not None
    assert entry.value == b"1"


def test_a_write_that_has_not_seen_the_newest_value_is_refused(store: Store) -> None:
    first = store.put("a", b"1", 0)
    second = store.put("a", b"2", first.revision)
    for stale in (0, first.revision, second.revision + 1):
        with pytest.raises(Conflict, match="a is at revision"):
            store.put("a", b"3", stale)
    assert store.get("a") == second


def test_a_key_that_must_not_exist(store: Store) -> None:
    store.put("a", b"1", 0)
    with pytest.raises(Conflict):
        store.put("a", b"2", 0)
    with pytest.raises(Conflict):
        store.put("b", b"2", 1)
    assert store.get("b") is None


def test_a_revision_never_comes_back(store: Store) -> None:
    """Else a writer that saw the first value could overwrite the second one's successor."""
    before = store.put("a", b"1", None)
    store.delete("a")
    assert store.get("a") is None
    after = store.put("a", b"1", 0)
    assert after.revision > before.revision
    with pytest.raises(Conflict):
        store.put("a", b"2", before.revision)


def test_keys_are_sorted_and_begin_with_the_prefix(store: Store) -> None:
    for key in ("job/b", "node/1", "job/a", "jobs"):
        store.put(key, b"", None)
    assert store.keys("job/") == ["job/a", "job/b"]
    assert store.keys("") == ["job/a", "job/b", "jobs", "node/1"]
    store.delete("job/a")
    assert store.keys("job/") == ["job/b"]


def test_one_holder_at_a_time(store: Store) -> None:
    lease = store.acquire("leader", "a", ttl_s=10, now=100)
    assert lease == Lease("a", lease.token, 110) if lease else False
    assert store.acquire("leader", "b", ttl_s=10, now=109.9) is None
    assert store.acquire("other", "b", ttl_s=10, now=109.9) is not None


def test_renewing_keeps_the_token(store: Store) -> None:
    first = store.acquire("leader", "a", ttl_s=10, now=100)
    again = store.acquire("leader", "a", ttl_s=10, now=109)
    assert first is not None
    assert again == Lease("a", first.token, 119)
    assert store.acquire("leader", "b", ttl_s=10, now=115) is None


@pytest.mark.parametrize("holder", ["a", "b"])
def test_after_it_has_expired_even_the_same_holder_gets_a_new_token(store: Store, holder: str) -> None:
    """Whoever comes after an expiry cannot know what happened in between."""
    first = store.acquire("leader", "a", ttl_s=10, now=100)
    second = store.acquire("leader", holder, ttl_s=10, now=110)
    assert first is not None
    assert second is not None
    assert second.token > first.token
    assert second.holder == holder


def test_only_the_holders_token_releases(store: Store) -> None:
    first = store.acquire("leader", "a", ttl_s=10, now=100)
    assert first is not None
    second = store.acquire("leader", "b", ttl_s=10, now=200)
    assert second is not None
    store.release("leader", first.token)
    store.release("nothing", first.token)
    assert store.acquire("leader", "c", ttl_s=10, now=201) is None
    store.release("leader", second.token)
    third = store.acquire("leader", "c", ttl_s=10, now=201)
    assert third is not None
    assert third.token > second.token


class Leases(RuleBasedStateMachine):
    """Whatever happens: one holder at any instant, and tokens that only grow."""

    make: Callable[[], Store] = EmbeddedStore

    def __init__(self) -> None:
        super().__init__()
        self.store = self.make()
        self.now = 0.0
        self.held: Lease | None = None
        self.newest = 0

    @rule(seconds=st.sampled_from([0.0, 0.5, 1.0, 3.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(holder=st.sampled_from("abc"), ttl_s=st.sampled_from([0.5, 1.0, 2.0]))
    def acquire(self, holder: str, ttl_s: float) -> None:
        lease = self.store.acquire("l", holder, ttl_s, self.now)
        in_force = self.held is not None and self.held.expires_at > self.now
        if in_force and self.held is not None and self.held.holder != holder:
            assert lease is None
            return
        assert lease is not None
        assert (lease.holder, lease.expires_at) == (holder, self.now + ttl_s)
        if in_force and self.held is not None:
            assert lease.token == self.held.token
        else:
            assert lease.token > self.newest
        self.newest, self.held = lease.token, lease

    @precondition(lambda self: self.held is not None)
    @rule()
    def release(self) -> None:
        assert self.held is not None
        self.store.release("l", self.held.token)
        self.held = None

    @rule(token=st.integers(0, 3))
    def release_with_an_old_token(self, token: int) -> None:
        if self.held is None or token != self.held.token:
            self.store.release("l", token)

    @invariant()
    def nobody_else_gets_what_is_held(self) -> None:
        if self.held is not None and self.held.expires_at > self.now:
            assert self.store.acquire("l", "somebody else", 1.0, self.now) is None


@pytest.mark.parametrize("make", IMPLEMENTATIONS, ids=lambda make: str(make.__name__))
def test_leases_in_any_order(make: Callable[[], Store]) -> None:
    machine = type("Machine", (Leases,), {"make": staticmethod(make)})
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(
        machine, settings=settings(max_examples=60, stateful_step_count=30, deadline=None)
    )
