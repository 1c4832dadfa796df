"""Calls of sessions: they take turns, the newest round wins, and what was committed stays committed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from session_desk import (
    BYTES_PER_TOKEN,
    NAME,
    Clock,
    Desk,
    HashSource,
    advance,
    asked,
    guessed,
    history,
    open_one,
    opened_desk,
    spec,
    table,
)

from draft_service.calls import Outcome, Round
from draft_service.history import Advance
from draft_service.rounds import Rounds
from draft_service.sources.base import Ask, DraftEnd
from draft_service.sources.lookup import InlineRunner
from draftwire.errors import (
    DraftwireError,
    FailedPrecondition,
    InvalidRequest,
    NotFound,
    Overloaded,
    PositionGap,
    Superseded,
)
from draftwire.wire import prefix_hash


@contextmanager
def refused(error: type[DraftwireError], reason: str) -> Iterator[None]:
    with pytest.raises(error) as caught:
        yield
    assert caught.value.reason == reason


async def test_a_round_commits_and_drafts_behind_what_it_committed() -> None:
    desk = await opened_desk()
    outcome = await desk.done(desk.draft(asked(1, [1, 2, 3, 4], 3)))
    assert outcome.committed_length == 4
    assert outcome.guess.ids == guessed([1, 2, 3, 4], 3)


async def test_assumed_ids_never_become_state() -> None:
    desk = await opened_desk()
    outcome = await desk.done(desk.draft(asked(1, [1, 2, 3], assumed=(7, 8))))
    assert (outcome.guess.ids, desk.held()) == (guessed([1, 2, 3, 7, 8], 3), [1, 2, 3])
    outcome = await desk.done(desk.draft(asked(2, [1, 2, 3, 4], 3)))
    assert outcome.guess.ids == guessed([1, 2, 3, 4], 3)


async def test_a_higher_round_takes_the_session_and_keeps_what_the_older_one_committed() -> None:
    desk = await opened_desk()
    older = asyncio.ensure_future(desk.draft(asked(1, [1, 2, 3, 4], 3)))
    await desk.runner.arrive()
    newer = asyncio.ensure_future(desk.draft(asked(2, [1, 2, 3, 4, 5], 4)))
    await desk.runner.run_out()
    with refused(Superseded, "SUPERSEDED"):
        await older
    assert (await newer).guess.ids == guessed([1, 2, 3, 4, 5], 3)
    assert desk.held() == [1, 2, 3, 4, 5]


async def test_a_superseded_call_that_waits_never_computes() -> None:
    desk = await opened_desk()
    calls = [asyncio.ensure_future(desk.draft(asked(n, [1, 2, 3]))) for n in (1, 2, 3)]
    await desk.runner.run_out()
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [Superseded, Superseded, Outcome]
    assert desk.source.drafts <= 2


async def test_a_lower_round_is_aborted_and_commits_nothing() -> None:
    desk = await opened_desk()
    await desk.done(desk.draft(asked(5, [1, 2, 3])))
    with refused(Superseded, "SUPERSEDED"):
        await desk.draft(asked(4, [1, 2, 3, 9], 3))
    with refused(Superseded, "SUPERSEDED"):
        desk.rounds.commit("me", asked(4, [1, 2, 3, 9], 3))
    assert desk.held() == [1, 2, 3]


async def test_an_equal_round_gets_the_same_answer_without_computing_again() -> None:
    desk = await opened_desk()
    first = await desk.done(desk.draft(asked(1, [1, 2, 3, 4], 3)))
    again = await desk.done(desk.draft(asked(1, [1, 2, 3, 4], 3, time_budget_s=9.0)))
    assert (again, desk.source.drafts) == (first, 1)


async def test_an_equal_round_waits_for_the_running_one() -> None:
    desk = await opened_desk()
    calls = [asyncio.ensure_future(desk.draft(asked(1, [1, 2, 3, 4], 3))) for _ in range(3)]
    await desk.runner.run_out()
    outcomes = await asyncio.gather(*calls)
    assert outcomes[0] == outcomes[1] == outcomes[2]
    assert desk.source.drafts == 1


async def test_an_equal_round_with_another_question_is_a_fault() -> None:
    desk = await opened_desk()
    await desk.done(desk.draft(asked(1, [1, 2, 3])))
    with pytest.raises(InvalidRequest, match="round"):
        await desk.draft(asked(1, [1, 2, 3], limit=2))
    with pytest.raises(InvalidRequest, match="round"):
        desk.rounds.commit("me", Round(session_id=NAME, number=1, advance=advance([1, 2, 3]), ask=None))


async def test_a_refused_round_can_be_asked_again_with_the_same_number() -> None:
    desk = await opened_desk()
    with refused(PositionGap, "POSITION_GAP"):
        await desk.draft(asked(1, [1, 2, 3, 4, 5], 4))
    outcome = await desk.done(desk.draft(asked(1, [1, 2, 3, 4, 5], 3)))
    assert outcome.guess.ids == guessed([1, 2, 3, 4, 5], 3)


async def test_a_caller_that_gives_up_stops_the_call_and_may_ask_again() -> None:
    desk = await opened_desk()
    lost = asyncio.ensure_future(desk.draft(asked(1, [1, 2, 3, 4], 3)))
    await desk.runner.arrive()
    lost.cancel()
    await desk.runner.run_out()
    assert lost.cancelled()
    assert (desk.source.stopped, desk.held()) == (1, [1, 2, 3, 4])
    outcome = await desk.done(desk.draft(asked(1, [1, 2, 3, 4], 3)))
    assert outcome.guess.ids == guessed([1, 2, 3, 4], 3)


async def test_a_retry_of_a_call_that_was_given_up_and_still_runs_gets_an_answer() -> None:
    desk = await opened_desk()
    lost = asyncio.ensure_future(desk.draft(asked(1, [1, 2, 3, 4], 3)))
    await desk.runner.arrive()
    lost.cancel()
    await desk.runner.arrive()
    outcome = await desk.done(desk.draft(asked(1, [1, 2, 3, 4], 3)))
    assert outcome.guess.ids == guessed([1, 2, 3, 4], 3)


async def test_one_of_two_callers_may_give_up() -> None:
    desk = await opened_desk()
    lost, kept = (asyncio.ensure_future(desk.draft(asked(1, [1, 2, 3, 4], 3))) for _ in range(2))
    await desk.runner.arrive()
    lost.cancel()
    await desk.runner.run_out()
    assert (await kept).guess.ids == guessed([1, 2, 3, 4], 3)


async def test_a_draft_ends_with_its_time_budget_and_says_so() -> None:
    desk = await opened_desk()
    late = asyncio.ensure_future(desk.draft(asked(1, [1, 2, 3, 4], 3, time_budget_s=0.5)))
    await desk.runner.arrive()
    desk.clock.now_s += 0.5
    await desk.runner.run_out()
    outcome = await late
    assert (outcome.guess.ids, outcome.guess.end, outcome.committed_length) == ((), DraftEnd.TIME_BUDGET, 4)
    assert outcome.queued_s == pytest.approx(0.5)


async def test_a_long_catch_up_goes_in_chunks_between_other_calls() -> None:
    desk = await opened_desk([1])
    desk.rounds.commit("me", Round(session_id=NAME, number=1, advance=advance(list(range(1, 15)), 1), ask=None))
    assert desk.runner.queue_depth == 0
    call = asyncio.ensure_future(desk.draft(asked(2, list(range(1, 15)), 14)))
    chunks = 0
    await desk.runner.arrive()
    while desk.runner.held:
        assert desk.runner.queue_depth == 1
        await desk.runner.step()
        chunks += 1
    assert chunks == 6
    assert (await call).guess.ids == guessed(list(range(1, 15)), 3)


async def test_a_draft_waits_for_the_prefill_and_does_not_stop_it() -> None:
    desk = Desk()
    filling = asyncio.ensure_future(desk.prefill(list(range(9))))
    await desk.runner.arrive()
    drafting = asyncio.ensure_future(desk.draft(asked(1, list(range(10)), 9)))
    await desk.runner.run_out()
    assert (await filling).committed_length == 9
    assert (await drafting).guess.ids == guessed(list(range(10)), 3)


async def test_a_prefill_takes_the_session_from_whatever_runs() -> None:
    desk = await opened_desk()
    older = [asyncio.ensure_future(desk.draft(asked(9, [1, 2, 3, 4], 3)))]
    await desk.runner.arrive()
    older.append(asyncio.ensure_future(desk.prefill([1, 2, 3, 4, 5])))
    await desk.runner.arrive()
    newest = asyncio.ensure_future(desk.prefill([1, 7]))
    await desk.runner.run_out()
    assert [type(error) for error in await asyncio.gather(*older, return_exceptions=True)] == [Superseded, Superseded]
    assert (await newest).committed_length == 2
    assert desk.held() == [1, 7]
    assert (await desk.done(desk.draft(asked(1, [1, 7])))).guess.ids == guessed([1, 7], 3)


@pytest.mark.parametrize(
    ("ids", "reused"),
    [([1, 2, 3, 4], 4), ([1, 2, 3, 4, 5], 4), ([1, 2], 2), ([1, 9, 3, 4], 1), ([9], 0), ([], 0)],
    ids=["same", "longer", "shorter", "another", "all other", "none"],
)
async def test_after_a_prefill_the_session_holds_exactly_the_ids_sent(ids: list[int], reused: int) -> None:
    desk = await opened_desk([1, 2, 3, 4])
    outcome = await desk.done(desk.prefill(ids))
    assert (outcome.committed_length, outcome.reused_length, desk.held()) == (len(ids), reused, ids)
    if ids:
        assert (await desk.done(desk.draft(asked(1, ids)))).guess.ids == guessed(ids, 3)


async def test_a_prefill_with_another_opening_gets_a_new_drafter() -> None:
    desk = await opened_desk([1, 2, 3])
    outcome = await desk.done(desk.prefill([1, 2, 3], max_length=50))
    assert (outcome.reused_length, desk.table.kv_bytes) == (0, 50 * BYTES_PER_TOKEN)
    assert [drafter.closed for drafter in desk.source.opened] == [1, 0]


async def test_a_release_ends_what_runs_and_closes_the_drafter_afterwards() -> None:
    desk = await opened_desk()
    running = asyncio.ensure_future(desk.draft(asked(1, [1, 2, 3])))
    await desk.runner.arrive()
    desk.table.release("me", [NAME])
    await desk.runner.run_out()
    with refused(NotFound, "SESSION_UNKNOWN"):
        await running
    assert [drafter.closed for drafter in desk.source.opened] == [1]
    with refused(NotFound, "SESSION_UNKNOWN"):
        await desk.draft(asked(2, [1, 2, 3]))


async def test_a_session_with_a_running_call_is_neither_swept_nor_evicted() -> None:
    desk = await opened_desk()
    running = asyncio.ensure_future(desk.draft(asked(1, [1, 2, 3])))
    await desk.runner.arrive()
    desk.clock.now_s += 10_000
    assert desk.table.sweep() == 0
    for name in "bc":
        open_one(desk.table, name)
    desk.clock.now_s += 1
    with refused(Overloaded, "SESSION_LIMIT"):
        open_one(desk.table, "d")
    await desk.runner.run_out()
    assert (await running).guess.ids == guessed([1, 2, 3], 3)


async def test_a_failed_computation_costs_its_session_and_no_other() -> None:
    desk = await opened_desk()
    desk.source.failing = True
    with pytest.raises(MemoryError):
        await desk.done(desk.draft(asked(1, [1, 2, 3])))
    assert (len(desk.table), desk.table.kv_bytes, desk.source.opened[0].closed) == (0, 0, 1)


async def test_drafts_stay_within_the_length_that_was_paid_for() -> None:
    desk = Desk()
    await desk.done(desk.prefill([1, 2, 3], max_length=7))
    assert len((await desk.done(desk.draft(asked(1, [1, 2, 3], limit=50)))).guess.ids) == 4
    assert len((await desk.done(desk.draft(asked(2, [1, 2, 3], limit=50, assumed=(4, 5))))).guess.ids) == 2
    outcome = await desk.done(desk.draft(asked(3, [1, 2, 3], assumed=(4, 5, 6, 7, 8))))
    assert (outcome.guess.ids, outcome.guess.end) == ((), DraftEnd.MAX_DRAFT_TOKENS)
    with pytest.raises(InvalidRequest, match="max_length 7"):
        await desk.draft(asked(4, [1, 2, 3, 4, 5, 6, 7, 8], 3))
    with pytest.raises(InvalidRequest, match="max_length 2"):
        await desk.prefill([1, 2, 3], max_length=2)


async def test_a_draft_inside_the_prompt_asks_for_the_rest() -> None:
    desk = Desk()
    await desk.done(desk.prefill([1, 2], prompt_length=4))
    with refused(PositionGap, "POSITION_GAP"):
        await desk.draft(asked(1, [1, 2, 3], 2))
    assert desk.held() == [1, 2]
    assert (await desk.done(desk.draft(asked(1, [1, 2, 3, 4], 2)))).committed_length == 4


async def test_closing_leaves_no_call_no_session_and_no_drafter() -> None:
    desk = await opened_desk()
    running = asyncio.ensure_future(desk.draft(asked(1, [1, 2, 3])))
    await desk.runner.arrive()
    closing = asyncio.ensure_future(desk.rounds.close())
    await desk.runner.run_out()
    await closing
    with pytest.raises(NotFound):
        await running
    assert (len(desk.table), [drafter.closed for drafter in desk.source.opened]) == (0, [1])


class RoundsMachine(RuleBasedStateMachine):
    """Any order of calls, against the rule written as a list: ids only grow, and a draft follows exactly them."""

    small = st.integers(0, 2)

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        clock = Clock()
        self.rounds = Rounds(table(clock), HashSource(), InlineRunner(), clock, max_draft_tokens=5)
        self.ids: list[int] | None = None
        self.newest: tuple[int, tuple[int, ...]] | None = None
        self.question: Round | None = None

    def teardown(self) -> None:
        self.loop.run_until_complete(self.rounds.close())
        self.loop.close()

    def call(self, work: Callable[[], Any]) -> Outcome | type[DraftwireError]:
        async def run() -> Any:
            made = work()
            return made if isinstance(made, Outcome) else await made

        try:
            outcome = self.loop.run_until_complete(run())
        except DraftwireError as error:
            return type(error)
        assert isinstance(outcome, Outcome)
        return outcome

    @rule(ids=st.lists(small, min_size=1, max_size=6))
    def prefill(self, ids: list[int]) -> None:
        outcome = self.call(
            lambda: self.rounds.prefill("me", NAME, spec=spec(max_length=40), history=history(ids), lease_s=None)
        )
        assert isinstance(outcome, Outcome)
        assert outcome.committed_length == len(ids)
        self.ids, self.newest = list(ids), None

    @rule(
        number=st.integers(0, 8), base=st.integers(0, 8), more=st.lists(small, max_size=3), flip=st.booleans(),
        assumed=st.lists(small, max_size=2), drafts=st.booleans(),
    )  # fmt: skip
    def ask(  # noqa: PLR0917 -- hypothesis passes them by name
        self, number: int, base: int, more: list[int], flip: bool, assumed: list[int], drafts: bool
    ) -> None:
        known = self.ids or []
        start = min(base, len(known)) if base < 7 else len(known) + 1
        path = [*known[:start], *more]
        if flip and path:
            path[0] += 1
        sent = Advance(base_length=start, ids=tuple(path[start:] if start <= len(known) else more),
                       prefix_hash=prefix_hash(path))  # fmt: skip
        question = Round(
            session_id=NAME,
            number=number,
            advance=sent,
            ask=Ask(assumed=tuple(assumed), limit=2) if drafts else None,
        )
        expected = self.expected(number, start, path, assumed, question)
        outcome = self.call(lambda: self.rounds.draft("me", question) if drafts else self.rounds.commit("me", question))
        if isinstance(expected, tuple):
            assert isinstance(outcome, Outcome)
            assert outcome.committed_length == len(self.ids or ())
            assert not drafts or outcome.guess.ids == expected
        else:
            assert outcome is expected

    def expected(
        self, number: int, start: int, path: list[int], assumed: list[int], question: Round
    ) -> type[DraftwireError] | tuple[int, ...]:
        if self.ids is None:
            return NotFound
        if self.newest is not None and number < self.newest[0]:
            return Superseded
        if self.newest is not None and number == self.newest[0]:
            return self.newest[1] if question == self.question else InvalidRequest
        if start > len(self.ids):
            return PositionGap
        common = min(len(path), len(self.ids))
        if path[:common] != self.ids[:common]:
            return FailedPrecondition
        if len(path) > 40:
            return InvalidRequest
        self.ids = path if len(path) > len(self.ids) else self.ids
        room = max(0, 40 - len(self.ids) - len(assumed))
        answer = guessed([*self.ids, *assumed], min(2, room)) if question.ask else ()
        self.newest, self.question = (number, answer), question
        return answer

    @precondition(lambda self: self.ids is not None)
    @rule()
    def release(self) -> None:
        async def run() -> None:
            self.rounds.table.release("me", [NAME])

        self.loop.run_until_complete(run())
        self.ids = self.newest = None

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        held = self.rounds.table.held("me", NAME).since(0)
        assert held == (self.ids or [])


TestRounds = RoundsMachine.TestCase
TestRounds.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
