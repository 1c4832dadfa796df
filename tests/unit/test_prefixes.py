"""The prefix cache of the drafter: bounded, longest prefix first, and no group ever sees another's."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from draft_service.prefixes import PrefixCache, common_length

MINE, YOURS = ("me", ""), ("you", "")


class Kept:
    """A prefix of one byte an id, of which any part can be taken over; with `whole`, all or nothing."""

    def __init__(self, ids: Sequence[int], *, whole: bool = False) -> None:
        self.ids = array("I", ids)
        self.nbytes = len(ids)
        self.whole = whole
        self.dropped = 0

    def reach(self, length: int) -> int:
        return length if not self.whole or length >= len(self.ids) else 0

    def drop(self) -> None:
        self.dropped += 1


def cache(limit_bytes: int = 100) -> PrefixCache:
    return PrefixCache(limit_bytes, lambda prefix: prefix.drop())


def found(at: PrefixCache, group: object, ids: Sequence[int]) -> tuple[list[int], int] | None:
    hit = at.find(group, array("I", ids))  # type: ignore[arg-type]
    return None if hit is None else (list(hit[0].ids), hit[1])


@given(st.lists(st.integers(0, 2), max_size=30), st.lists(st.integers(0, 2), max_size=30))
def test_the_common_length_is_that_of_comparing_one_by_one(left: list[int], right: list[int]) -> None:
    expected = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), None)
    expected = min(len(left), len(right)) if expected is None else expected
    assert common_length(array("I", left), array("I", right)) == expected


def test_counts_are_those_of_what_was_asked_found_and_evicted() -> None:
    """What a longer one replaces, what was there already, what is too large and what a clear drops is no eviction."""
    at = cache(10)
    assert found(at, MINE, [1, 2, 3]) is None
    at.add(MINE, Kept([1, 2]))
    at.add(MINE, Kept([1, 2, 3, 4]))
    at.add(MINE, Kept([1, 2, 3]))
    at.add(MINE, Kept(range(11)))
    assert found(at, MINE, [1, 2, 3, 9, 9]) == ([1, 2, 3, 4], 3)
    assert found(at, YOURS, [1, 2]) is None
    assert (at.queried_tokens, at.found_tokens, at.evicted) == (10, 3, {"prefix": 0, "session": 0})
    at.add(YOURS, Kept([5] * 7))
    assert at.evicted == {"prefix": 1, "session": 0}
    at.add(MINE, Kept([6]))
    at.fit(8)
    at.fit(5)
    assert (at.evicted, at.nbytes) == ({"prefix": 1, "session": 1}, 1)
    at.clear()
    assert (at.evicted, at.nbytes, len(at)) == ({"prefix": 1, "session": 1}, 0, 0)


def test_the_longest_common_prefix_is_found_but_never_the_last_id_asked_for() -> None:
    at = cache()
    at.add(MINE, Kept([1, 2, 3, 4, 5]))
    at.add(MINE, Kept([1, 2, 9]))
    assert found(at, MINE, [1, 2, 3, 4, 8]) == ([1, 2, 3, 4, 5], 4)
    assert found(at, MINE, [1, 2, 9, 9]) == ([1, 2, 9], 3)
    assert found(at, MINE, [1, 2, 3, 4, 5]) == ([1, 2, 3, 4, 5], 4)
    assert found(at, MINE, [7]) is None
    assert found(at, MINE, [1]) is None
    assert found(at, MINE, []) is None


def test_no_group_sees_anothers() -> None:
    at = cache()
    at.add(MINE, Kept([1, 2, 3]))
    for other in (YOURS, ("me", "salt"), ("m", "e")):
        assert found(at, other, [1, 2, 3, 4]) is None


def test_a_prefix_that_another_holds_wholly_is_not_kept_twice() -> None:
    at = cache()
    short, long, again = Kept([1, 2]), Kept([1, 2, 3]), Kept([1, 2])
    for prefix in (short, long, again):
        at.add(MINE, prefix)
    assert (len(at), at.nbytes) == (1, 3)
    assert (short.dropped, long.dropped, again.dropped) == (1, 0, 1)


def test_recurrent_state_is_kept_at_each_stored_length_and_taken_over_at_no_other() -> None:
    at = cache()
    at.add(MINE, Kept([1, 2], whole=True))
    at.add(MINE, Kept([1, 2, 3, 4], whole=True))
    assert len(at) == 2
    assert found(at, MINE, [1, 2, 3, 9]) == ([1, 2], 2)
    assert found(at, MINE, [1, 2, 3, 4, 5]) == ([1, 2, 3, 4], 4)
    assert found(at, MINE, [1, 2]) is None


def test_the_least_recently_used_goes_first_whoever_owns_it() -> None:
    at = cache(9)
    at.add(MINE, Kept([1, 1, 1]))
    at.add(YOURS, Kept([2, 2, 2]))
    at.add(MINE, Kept([3, 3, 3]))
    assert found(at, MINE, [1, 1, 1, 0]) is not None
    at.add(YOURS, Kept([4, 4, 4]))
    assert found(at, YOURS, [2, 2, 2, 0]) is None
    assert found(at, MINE, [1, 1, 1, 0]) is not None
    at.fit(3)
    assert (len(at), at.nbytes) == (1, 3)
    at.clear()
    assert (len(at), at.nbytes) == (0, 0)


@pytest.mark.parametrize(("limit", "kept"), [(0, 0), (2, 0), (3, 1)])
def test_what_is_larger_than_the_limit_is_not_kept_and_evicts_nobody(limit: int, kept: int) -> None:
    at = cache(limit)
    prefix = Kept([1, 2, 3])
    at.add(MINE, prefix)
    assert (len(at), prefix.dropped) == (kept, 1 - kept)


class Machine(RuleBasedStateMachine):
    """Against a list: the bytes add up, each prefix is dropped exactly once, and the best of the own group is found."""

    ids = st.lists(st.integers(0, 1), min_size=1, max_size=5)
    groups = st.sampled_from([MINE, YOURS])

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[object, Kept]] = []
        self.at = cache(12)

    def kept(self, group: object | None = None) -> list[Kept]:
        return [prefix for owner, prefix in self.made if not prefix.dropped and group in (None, owner)]

    @rule(group=groups, ids=ids, whole=st.booleans())
    def add(self, group: tuple[str, str], ids: list[int], whole: bool) -> None:
        self.made.append((group, Kept(ids, whole=whole)))
        self.at.add(group, self.made[-1][1])

    @rule(group=groups, ids=ids)
    def find(self, group: tuple[str, str], ids: list[int]) -> None:
        asked = array("I", ids)
        lengths = [p.reach(max(0, min(common_length(p.ids, asked), len(ids) - 1))) for p in self.kept(group)]
        hit = self.at.find(group, asked)
        assert (hit[1] if hit else 0) == max(lengths, default=0)
        assert hit is None or (list(hit[0].ids[: hit[1]]) == ids[: hit[1]] and hit[0] in self.kept(group))

    @rule(most=st.integers(0, 12))
    def fit(self, most: int) -> None:
        self.at.fit(most)
        assert self.at.nbytes <= most

    @invariant()
    def adds_up(self) -> None:
        assert self.at.nbytes == sum(prefix.nbytes for prefix in self.kept()) <= 12
        assert len(self.at) == len(self.kept())
        assert all(prefix.dropped <= 1 for _, prefix in self.made)


TestPrefixCache = Machine.TestCase
