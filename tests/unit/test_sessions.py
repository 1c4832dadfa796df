"""Sessions: committed ids only grow, and what does not fit is refused before anything changes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from session_desk import (
    Clock,
    advance,
    history,
    open_one,
    table,
)

from draft_service.history import Advance, History
from draftwire.errors import (
    FailedPrecondition,
    NotFound,
    Overloaded,
    PermissionDenied,
    PositionGap,
)
from draftwire.wire import prefix_hash

ids_lists = st.lists(st.integers(0, 2**32 - 1) | st.integers(0, 2), max_size=12)


@given(st.lists(ids_lists, max_size=6), st.data())
def test_a_history_holds_what_was_sent_in_order_whatever_the_overlaps(chunks: list[list[int]], data: Any) -> None:
    held = History()
    text: list[int] = []
    for chunk in chunks:
        base_length = data.draw(st.integers(0, len(text)))
        text += chunk
        end = data.draw(st.integers(base_length, len(text)))
        before = len(held)
        added = held.apply(advance(text[:end], base_length))
        text = text[: max(end, before)]
        assert added == len(text) - before
        assert held.since(0) == text
        assert [held.hash_at(n) for n in range(len(text) + 1)] == [prefix_hash(text[:n]) for n in range(len(text) + 1)]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=10), st.lists(st.integers(0, 3), max_size=10), st.data())
def test_an_overlap_that_differs_is_refused_and_changes_nothing(text: list[int], other: list[int], data: Any) -> None:
    held = history(text)
    base_length = data.draw(st.integers(0, min(len(text), len(other))))
    common = min(len(text), len(other))
    if text[:common] == other[:common]:
        held.apply(advance(other, base_length))
        assert held.since(0) == (other if len(other) > len(text) else text)
    else:
        with pytest.raises(FailedPrecondition) as caught:
            held.apply(advance(other, base_length))
        assert caught.value.reason == "PREFIX_MISMATCH"
        assert caught.value.metadata == {"committed_length": str(len(text))}
        assert held.since(0) == text


def test_a_gap_says_where_to_resume() -> None:
    held = history([1, 2, 3])
    with pytest.raises(PositionGap) as caught:
        held.apply(advance([1, 2, 3, 4, 5], 4))
    assert caught.value.metadata == {"committed_length": "3"}
    assert held.since(0) == [1, 2, 3]


def test_a_wrong_hash_is_refused_though_the_sent_ids_agree() -> None:
    held = history([1, 2, 3])
    with pytest.raises(FailedPrecondition):
        held.apply(Advance(base_length=2, ids=(3,), prefix_hash=prefix_hash([9, 2, 3])))


def test_ids_that_differ_are_refused_though_the_hash_is_right() -> None:
    held = history([1, 2, 3])
    with pytest.raises(FailedPrecondition):
        held.apply(Advance(base_length=1, ids=(9, 3), prefix_hash=prefix_hash([1, 2, 3])))


def test_a_prefix_is_a_copy_of_its_own() -> None:
    held = history([1, 2, 3])
    copy = held.prefix(2)
    copy.apply(advance([1, 2, 9], 2))
    assert (copy.since(0), held.since(0)) == ([1, 2, 9], [1, 2, 3])


def test_a_full_table_evicts_the_session_that_was_idle_longest() -> None:
    clock = Clock()
    at = table(clock)
    for name in "abc":
        open_one(at, name)
        clock.now_s += 10
    at.find("me", "a")
    clock.now_s += 6
    open_one(at, "d")
    with pytest.raises(NotFound) as caught:
        at.find("me", "b")
    assert caught.value.reason == "SESSION_UNKNOWN"
    assert [at.find("me", name).session_id for name in "acd"] == ["a", "c", "d"]


def test_a_full_table_of_sessions_in_use_refuses_and_says_when_to_retry() -> None:
    clock = Clock()
    at = table(clock)
    for name in "abc":
        open_one(at, name)
        clock.now_s += 1
    with pytest.raises(Overloaded) as caught:
        open_one(at, "d")
    assert (caught.value.reason, caught.value.retry_after_s) == ("SESSION_LIMIT", 2.0)
    assert len(at) == 3
    clock.now_s += 2.0
    open_one(at, "d")
    assert len(at) == 3


def test_memory_is_charged_before_work_and_given_back() -> None:
    clock = Clock()
    at = table(clock)
    open_one(at, "a", kv_bytes=700)
    with pytest.raises(Overloaded) as caught:
        open_one(at, "b", kv_bytes=301)
    assert (caught.value.reason, at.kv_bytes, len(at)) == ("KV_BUDGET", 700, 1)
    open_one(at, "b", kv_bytes=300)
    open_one(at, "a", kv_bytes=100)
    assert at.kv_bytes == 400
    at.release("me", ["a", "never opened"])
    at.release("me", ["a"])
    assert (at.kv_bytes, len(at)) == (300, 1)


def test_no_more_is_evicted_than_makes_room() -> None:
    clock = Clock()
    at = table(clock)
    open_one(at, "a", kv_bytes=500)
    clock.now_s += 1
    open_one(at, "b", kv_bytes=400)
    clock.now_s += 9
    open_one(at, "c", kv_bytes=300)
    assert (len(at), at.kv_bytes) == (2, 700)
    assert at.find("me", "b").charged_bytes == 400


def test_nothing_is_evicted_for_a_session_that_will_not_fit_anyway() -> None:
    clock = Clock()
    at = table(clock)
    open_one(at, "a", kv_bytes=500)
    clock.now_s += 50
    with pytest.raises(Overloaded):
        open_one(at, "b", kv_bytes=1001)
    assert len(at) == 1


def test_a_session_belongs_to_its_owner() -> None:
    at = table(Clock())
    open_one(at, "a", owner="me")
    for call in (lambda: at.find("you", "a"), lambda: open_one(at, "a", owner="you"), lambda: at.held("you", "a")):
        with pytest.raises(PermissionDenied):
            call()
    at.release("you", ["a"])
    assert at.find("me", "a").owner == "me"


@pytest.mark.parametrize(("wanted_s", "granted_s"), [(None, 60.0), (5.0, 5.0), (10_000.0, 600.0)])
def test_leases_are_granted_within_limits_renewed_by_use_and_swept(wanted_s: float | None, granted_s: float) -> None:
    clock = Clock()
    at = table(clock)
    session = open_one(at, "a", lease_s=wanted_s)
    assert session.lease_s == granted_s
    clock.now_s += granted_s
    assert at.sweep() == 0
    at.find("me", "a")
    clock.now_s += granted_s
    assert at.find("me", "a") is session
    clock.now_s += granted_s + 0.1
    with pytest.raises(NotFound):
        at.find("me", "a")
    assert (at.sweep(), len(at), at.kv_bytes) == (0, 0, 0)


class TableMachine(RuleBasedStateMachine):
    """The table against a dictionary: counts and bytes never exceed the limits, and only idle sessions ever go."""

    names = st.sampled_from("abcdef")

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.table = table(self.clock)
        self.table.on_close = lambda session: self.gone.add(session.session_id)
        self.gone: set[str] = set()
        self.used: dict[str, float] = {}

    @rule(name=names, kv_bytes=st.integers(0, 600))
    def open(self, name: str, kv_bytes: int) -> None:
        before = dict(self.used)
        try:
            open_one(self.table, name, kv_bytes=kv_bytes)
        except Overloaded:
            assert not self.gone - {name}
            self._collect()
            return
        assert all(self.clock.now_s - before[other] >= 5 for other in self.gone)
        self._collect()
        self.used[name] = self.clock.now_s

    @rule(name=names)
    def find(self, name: str) -> None:
        try:
            self.table.find("me", name)
        except NotFound:
            assert name not in self.used or self.clock.now_s - self.used[name] > 60
        else:
            self.used[name] = self.clock.now_s
        self._collect()

    @rule(name=names)
    def release(self, name: str) -> None:
        self.table.release("me", [name])
        self._collect()
        assert name not in self.used

    @rule(seconds=st.sampled_from([0.5, 3.0, 20.0, 70.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now_s += seconds

    @rule()
    def sweep(self) -> None:
        self.table.sweep()
        self._collect()
        assert all(self.clock.now_s - used <= 60 for used in self.used.values())

    def _collect(self) -> None:
        for name in self.gone:
            self.used.pop(name, None)
        self.gone.clear()

    @invariant()
    def within_limits(self) -> None:
        assert len(self.table) == len(self.used) <= 3
        assert 0 <= self.table.kv_bytes <= 1000
        assert len(self.table) or not self.table.kv_bytes


TestTable = TableMachine.TestCase
