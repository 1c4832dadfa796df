"""One request on its way: its ledger, its drafts, its place in the engine, and the outbox that its stream drains."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace

from draftwire.errors import DraftwireError
from draftwire.rollback import Rollback
from target_service.controller import Controller, Plan
from target_service.drafts import Answer, DraftSource, NoDrafts, Offer
from target_service.forcing import Certainty, Joined, join
from target_service.ledger import Committed, Finish, Ledger, Released
from target_service.matcher import Matcher
from target_service.params import DraftingMode, Generation
from target_service.recorder import NullRecorder, Recorder
from target_service.spans import NoSpan, RequestSpan
from target_service.stats import SpeculationCounts, Times
from target_service.widths import Bid
from target_service.window import Choice, Window

_OUTBOX_ROUNDS = 64
NO_ROOM_LIMIT = 1 << 30


@dataclass(frozen=True, slots=True)
class Admitted:
    """Work has begun."""


@dataclass(frozen=True, slots=True)
class Done:
    """The completion has ended; the sequence has the statistics."""

    finish: Finish


Outcome = Admitted | Released | Done | DraftwireError


class Sequence:
    """Belongs to the event loop. A round calls, in this order: `collect`, `bid`, `window`, `book`, `wish`, `ask`, `emit`."""

    def __init__(
        self,
        generation: Generation,
        ledger: Ledger,
        controller: Controller,
        matcher: Matcher | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        """matcher: that of the ledger, for a request with a constraint."""
        self.generation = generation
        self.ledger = ledger
        self.matcher = matcher
        self._certainty = Certainty()
        self._forced: tuple[int, ...] = ()
        self._joined: Joined | None = None
        """The drafts of the last bid."""
        self.counts = SpeculationCounts()
        self.times = Times(arrived=time.monotonic())
        self.outbox: asyncio.Queue[Outcome] = asyncio.Queue()
        self.slot: int | None = None
        self.prefilled = 0
        self.cached_tokens = 0
        """Prompt tokens that came from the prefix cache."""
        self.filled = False
        """Whether what the prefix cache has is in place, so that the rest of the prompt can be read."""
        self.cancelled = False
        self.room = NO_ROOM_LIMIT
        """Drafts that fit beside the other sequences of a tick; the scheduler sets it."""
        self.source: DraftSource = NoDrafts()
        self.span: RequestSpan = NoSpan()
        """Its place in a trace."""
        self._recorder = recorder or NullRecorder()
        self._told_tokens = 0
        self._told_s: float | None = None
        self.suspect = False
        """Whether it was in a forward that failed, and has not been in one alone since."""
        self.controller = controller
        self._to_read = ledger.prompt_length - 1
        self._faults = 0
        self._met = False
        self._rollback: Rollback | None = None
        self._plan = Plan(0, 0.0, "first_round")
        self._asked_s = 0.0
        self._offer: Offer | None = None
        self._ahead = False
        self._missed_patience = False
        self._answer: Answer | None = None
        self._landed_s: float | None = None

    @property
    def unread(self) -> int:
        """Ids that its cache must read before it can take part in a round: the prompt's, but for the last."""
        return self._to_read - self.prefilled

    def next_ids(self, rows: int) -> list[int]:
        """The next ids of the prompt to be prefilled."""
        return self.ledger.ids[self.prefilled : self.prefilled + rows]

    @property
    def decodable(self) -> bool:
        """Whether it can take part in a round: prompt read, reader keeping up."""
        return self.filled and not self.unread and self.slot is not None and not self.crowded

    @property
    def readable(self) -> bool:
        """Whether some of its prompt can be read now."""
        return self.filled and self.unread > 0 and self.slot is not None and not self.cancelled

    @property
    def last_prompt(self) -> int:
        """Where reading the prompt ends: its last token is pending."""
        return self.ledger.prompt_length - 1

    @property
    def cached_ids(self) -> list[int]:
        """The ids whose rows the target's cache holds between two rounds, and at the end."""
        if self.unread:
            return self.ledger.ids[: self.prefilled]
        # Where an end token ends it, pending was fed and nothing came after it.
        return self.ledger.ids[: self.ledger.cached_length + int(self.ledger.ended_by_token)]

    @property
    def crowded(self) -> bool:
        """Whether the reader is so far behind that the sequence waits for it; memory stays bounded."""
        return self.outbox.qsize() >= _OUTBOX_ROUNDS

    def admit(self, slot: int, rollback: Rollback, source: DraftSource) -> None:
        """Takes its place."""
        self.slot = slot
        self.source = source
        self._rollback = rollback
        self.times.admitted = time.monotonic()
        self._recorder.admitted(self.times.queued_s)

    def begin(self, cached: int) -> None:
        """Begins to read the prompt behind what the prefix cache had of it."""
        self.filled = True
        self.cached_tokens = self.prefilled = cached
        if not self.unread:
            self.times.prefilled = time.monotonic()
        self._foresee()
        self.outbox.put_nowait(Admitted())

    def patience_left_s(self, now_s: float) -> float:
        """Seconds that the next round may still wait for this sequence's drafts."""
        if not self.source.asking or self._missed_patience or self._plan.patience_s <= 0:
            return 0.0
        left = self._asked_s + self._plan.patience_s - now_s
        if left > 0:
            return left
        self.missed()
        return 0.0

    def missed(self) -> None:
        """The round goes on without the drafts that it waited for."""
        self._missed_patience = True
        self.controller.late()

    def waited_for_s(self, since_s: float) -> float | None:
        """Seconds between its question and since_s, where the round is to wait for the answer; else None."""
        return since_s - self._asked_s if self._plan.patience_s > 0 and self._plan.ask > 0 else None

    def collect(self) -> None:
        """Takes what has come from the drafter."""
        came = self.source.take()
        if isinstance(came, Answer):
            self._answer = came
            self.controller.answered(len(came.ids), came.delay_s, came.computed_s)
            self._offer = Offer(came.base_length, came.ids)
            self._score()
        elif came is not None:
            self._met = False
            self.controller.lost()

    def bid(self) -> Bid:
        """What it can bring to the next forward with the drafts that are here."""
        joined = self._joined = self._drafts()
        if not joined.ids:
            return Bid()
        agreed = self._offer.agreed if self._offer is not None else 0
        return self.controller.bid(len(joined.ids), agreed, joined.sure, joined.tail, self._certainty.chance)

    def hoped(self) -> Bid:
        """What it could bring once its question is answered."""
        return self.controller.bid(min(self._plan.ask, self._limit()), 0)

    def window(self, most: int, *, may_run_ahead: bool = True) -> Window:
        """[pending, *drafts] for the next forward, with at most so many drafts. may_run_ahead: whether the one after it may be
        begun ahead."""
        assert self.slot is not None
        joined = self._joined if self._joined is not None else self._drafts()
        joined, self._joined = joined.first(most), None
        drafts, matcher = joined.ids, self.matcher
        choosing = self.generation.choosing
        alone = not drafts and may_run_ahead and self._may_run_ahead()
        # What a constraint forces next is known when this window has been read, not before.
        self._ahead = alone and (matcher is None or self._off)
        history: tuple[int, ...] = ()
        if choosing.penalties.on:
            history = tuple(self.ledger.ids[-choosing.penalties.window :])
        return Window(
            slot=self.slot,
            pending=self.ledger.pending,
            drafts=drafts,
            first_step=self.ledger.step,
            history=history,
            ahead=self._ahead,
            likely=alone,
            limits=None if matcher is None else lambda: matcher.limits(drafts),
            forced=joined.own,
        )

    def book(self, window: Window, choice: Choice, committed: Committed, emitted: int) -> None:
        """Counts a round, and scores drafts against what was committed."""
        self.suspect = False
        if self.times.first_token is None:
            self.times.first_token = time.monotonic()
            self._recorder.first_token(self.ledger.prompt_length, self.times)
        drafted = len(window.drafts)
        reason = "" if drafted else self._why_none()
        made = {"drafted": drafted, "accepted": committed.accepted, "cut": committed.cut, "emitted": emitted}
        self.counts.book(**made, reason=reason, forced=window.forced)
        self._recorder.round(**made, reason=reason)
        self.counts.near_ties += sum(choice.near[:emitted])
        if self._forced and drafted:
            tried = min(len(self._forced), drafted)
            self._certainty.scored(tried, min(tried, committed.accepted))
        self._score()

    def wish(self) -> int | None:
        """Most drafts that it may ask for now; None while a question runs."""
        self._missed_patience = False
        self._foresee()
        if self.source.asking:
            # A late answer may still fit; a second question would only take its place.
            self._plan = Plan(0, 0.0, "late")
            return None
        limit = min(self._limit(), self.source.limit)
        if limit and not self._met:
            self._met = True
            self.controller.meet(self.source.report().drafter_id)
        return limit

    def ask(self, plan: Plan) -> None:
        """Follows a plan for the next round. Before `emit`: the question travels meanwhile."""
        self._plan = plan
        rest = len(self._offer.rest) if self._offer else 0
        if plan.ask == 0 or max(rest, len(self._forced)) >= plan.ask or not self.source.ready:
            return
        if self._forced:
            # There is something to verify already: nobody waits for more.
            self._plan = replace(self._plan, patience_s=0.0)
        self._drop_offer()
        self._asked_s = time.monotonic()
        self.source.ask(self.ledger.ids, plan.ask)

    def faulted(self) -> int:
        """It was in a forward that failed together with others. Returns how often so far."""
        self.suspect = True
        self._faults += 1
        return self._faults

    def restart(self) -> None:
        """Its cache is empty again: it reads what is committed, and goes on."""
        self.prefilled = 0
        self.filled = True
        self._to_read = self.ledger.cached_length
        self._joined = None
        self._ahead = False
        self._offer = None

    def emit(self, committed: Committed) -> None:
        """Hands a round's text to the stream."""
        self._tell_delivered()
        if committed.released is not None:
            self.outbox.put_nowait(committed.released)
        if committed.finish is not None:
            self.times.finished = time.monotonic()
            if not self.cancelled:
                self._recorder.finished(committed.finish.reason.value, self.ledger.completion_tokens, self.times)
            self.outbox.put_nowait(Done(committed.finish))

    def trace(self, window: Window, choice: Choice, committed: Committed) -> dict[str, str | int | float | None]:
        """One round in one log line: what was planned, what came of it, and where the time went (milliseconds).

        `round_ms` runs from the last forward's end to this one's; what it has beyond `forward_ms` and `computed_ms` (the
        drafter's own computing) is overhead.
        """
        landed_s, before_s = choice.landed_s, self._landed_s
        self._landed_s = landed_s
        answer, self._answer = self._answer, None
        joint = self._plan.joint
        return {
            "request_id": self.generation.request_id,
            "step": window.first_step,
            "drafted": len(window.drafts),
            "accepted": committed.accepted,
            "next": self._plan.reason,
            "asked": self._plan.ask,
            "patience_ms": round(self._plan.patience_s * 1e3, 2),
            "gain": round(joint.gain, 3) if joint else None,
            "asking": len(joint.askers) if joint else None,
            "expected_tokens": round(joint.tokens, 2) if joint else None,
            "expected_forward_ms": round(joint.forward_s * 1e3, 2) if joint else None,
            "expected_wait_ms": round(joint.wait_s * 1e3, 2) if joint else None,
            "plain_ms": round(joint.plain_s * 1e3, 2) if joint else None,
            "ahead": window.ahead,
            "round_ms": round((landed_s - before_s) * 1e3, 3) if before_s is not None else None,
            "forward_ms": round(choice.forward_s * 1e3, 3),
            "rpc_ms": round(answer.delay_s * 1e3, 3) if answer else None,
            "computed_ms": round(answer.computed_s * 1e3, 3) if answer else None,
        }

    def fail(self, error: DraftwireError) -> None:
        """Ends the stream with an error."""
        self._tell_end(error.reason)
        self.cancelled = True
        self.outbox.put_nowait(error)

    def left(self) -> None:
        """Tells that nobody reads the stream any more."""
        self._tell_end("CLIENT_LEFT")

    def _tell_end(self, reason: str) -> None:
        """Books an end that is none of the completion's own, once."""
        if self.times.finished is None and not self.cancelled:
            self._recorder.failed(reason)

    def _tell_delivered(self) -> None:
        tokens = self.ledger.completion_tokens - self._told_tokens
        if tokens:
            before_s, self._told_s = self._told_s, time.monotonic()
            self._told_tokens += tokens
            self._recorder.delivered(tokens, None if before_s is None else self._told_s - before_s)

    @property
    def _off(self) -> bool:
        return self.generation.drafting.mode is DraftingMode.OFF

    def _foresee(self) -> None:
        """Looks what the constraint forces next."""
        if self.matcher is not None and not self._off:
            self._forced = self.matcher.forced((), self._limit())

    def _drafts(self) -> Joined:
        """Those that the next window may have; none where its forward has been begun ahead."""
        if self._ahead:
            return Joined(())
        limit = self._limit()
        rest = self._offer.rest[:limit] if self._offer is not None else ()
        return Joined(rest) if self.matcher is None else join(self.matcher, self._forced, rest, limit)

    def _limit(self) -> int:
        """Most drafts that budget and cache allow: the last token of the budget needs none."""
        assert self._rollback is not None
        room = min(self.room, self._rollback.room(self.ledger.cached_length))
        return max(0, min(room, self.ledger.remaining - 1, self.generation.drafting.max_drafts))

    def _may_run_ahead(self) -> bool:
        """Whether the next window will surely be [what this one chooses] alone."""
        choosing = self.generation.choosing
        if self.ledger.remaining <= 1 or choosing.penalties.on or self._plan.patience_s > 0:
            return False
        if self._offer is not None and self._offer.rest:
            return False
        # A filter's search may change the id after the fact; then the begun forward has to be taken back.
        assert self._rollback is not None
        searches = choosing.sampler.filters and not choosing.sampler.greedy
        return not searches or self._rollback.room(self.ledger.cached_length) >= 2

    def _score(self) -> None:
        if self._offer is None:
            return
        self._offer.update(self.ledger.ids)
        if self._offer.resolved:
            self._drop_offer()

    def _drop_offer(self) -> None:
        """Forgets the offer. What is not known to be wrong or right counts as not offered."""
        offer, self._offer = self._offer, None
        if offer is not None:
            proposed = len(offer.ids) if offer.resolved else offer.agreed
            self.controller.scored(proposed, offer.agreed)
            self.source.scored(proposed, offer.agreed)

    def _why_none(self) -> str:
        if self.generation.drafting.mode is DraftingMode.OFF:
            return "off"
        if self.room == 0:
            return "no_room"
        if self._limit() == 0:
            assert self._rollback is not None
            return "cache" if self._rollback.room(self.ledger.cached_length) == 0 else "budget"
        if self.source.limit == 0 and not self.source.asking:
            missing = self.source.report().missing
            return "no_drafter" if missing == "tokenizer_mismatch" else missing
        if self.source.asking:
            return "late" if self._plan.reason != "not_worth_it" else "not_worth_it"
        return "no_match" if self._plan.reason in ("pays", "fixed") else self._plan.reason
