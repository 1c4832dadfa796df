"""A prompt that begins with what was kept gives what a cold process gives, bit for bit, and nobody gets another's text."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import pytest
from harness import Result, Script, ScriptedSource, complete, drain, fixed, generation, loaded_target

from draftwire.sampling import Sampler
from draftwire.testing_kinds import CacheKind
from draftwire.testing_models import TINY_VOCAB, TinyKind, save_tiny_model
from target_service.core import Target
from target_service.drafts import DraftSource, Lost, NoDrafts
from target_service.ledger import Released
from target_service.params import Choosing, Generation
from target_service.prefix.keys import BLOCK
from target_service.sequence import Sequence as Request

pytestmark = pytest.mark.exact

KINDS = ("llama", "gemma3", *get_args(CacheKind))
THOROUGH = ("llama", "gemma3", "qwen3_next")
"""One that batches, one with windows, one with recurrent state: these end at every position of a burst."""
LOOSE = ("falcon_h1", "mamba2", "longcat_flash", "deepseek_v32")
"""mlx-lm computes a single row of these in another way than several; see test_caches_invariance."""
TOLERANCE = 1e-4
BURST = 4
GREEDY = Choosing(top_logprobs=1)
DRAWN = Choosing(sampler=Sampler(temperature=1.1, top_p=0.9, seed=5), top_logprobs=1)
PROMPT = [(7 * i * i + 3 * i) % 256 for i in range(70)]


@dataclass(frozen=True, slots=True)
class Pair:
    """The same model twice: one remembers, one does not."""

    warm: Target
    cold: Target
    loose: bool = False

    async def agree(self, wanted: Generation, *, cached: int | None = None) -> Request:
        """A request gets from both what a user must see alike. cached: tokens that must have been reused."""
        request = self.warm.submit(wanted)
        result = await drain(request)
        expected = await complete(self.cold, wanted)
        assert result.ids == expected.ids
        assert same(result, expected, self.loose)
        assert self.cold.prefixes is None
        if cached is not None:
            assert request.cached_tokens == cached
        return request


@asynccontextmanager
async def pair(folder: Path, kind: TinyKind, *, loose: bool = False, **settings: Any) -> AsyncIterator[Pair]:
    memory = settings.pop("prompt_cache_bytes", 1 << 30)
    disk = settings.pop("prompt_cache_dir", None)
    if not (folder / kind).exists():
        head_dim = 32 if settings.get("kv_bits") else 16
        save_tiny_model(folder / kind, kind, 7, context_length=1024, sliding_window=16, head_dim=head_dim)
    async with (
        loaded_target(folder / kind, prompt_cache_bytes=memory, prompt_cache_dir=disk, **settings) as warm,
        loaded_target(folder / kind, prompt_cache_bytes=0, **settings) as cold,
    ):
        yield Pair(warm, cold, loose)
        assert warm.engine.slots == cold.engine.slots == 0


def same(one: Result, other: Result, loose: bool) -> bool:
    if not loose:
        return one.visible == other.visible
    pairs = zip(one.logprobs, other.logprobs, strict=True)
    return replace(one, logprobs=()).visible == replace(other, logprobs=()).visible and all(
        a is not None and b is not None and math.isclose(a.logprob, b.logprob, abs_tol=TOLERANCE) for a, b in pairs
    )


def firsts(ids: Sequence[int], begin: int) -> list[int]:
    """Places from `begin` on whose id did not come before."""
    return [place for place in range(begin, len(ids)) if ids[place] not in ids[:place]]


def knowing(truth: list[int], *, lost_at: int | None = None, wrong: bool = False) -> Script:
    """A drafter that is right, so that a burst is as long as it can be; or wrong in the last; or gone from somewhere on."""

    def script(ids: list[int], drafts: int) -> list[int] | Lost:
        if lost_at is not None and len(ids) >= lost_at:
            return Lost("gone")
        found = truth[len(ids) : len(ids) + abs(drafts)]
        return [*found[:-1], (found[-1] + 1) % TINY_VOCAB] if wrong and found else found

    return script


def ends(plain: Result, places: int) -> Iterator[tuple[str, Generation]]:
    """Requests that end in every way, each at several places of a burst."""
    first = firsts(plain.ids, 3)
    for place in first[:places]:
        for name in ("end_ids", "stop_ids"):
            yield f"{name} {place}", generation(PROMPT, choosing=GREEDY, **{name: frozenset({plain.ids[place]})})
    printable = [place for place in first if 33 <= plain.ids[place] < 127]
    for place in printable[:places]:
        yield f"stop {place}", generation(PROMPT, choosing=GREEDY, stops=(chr(plain.ids[place]),))
    for tokens in range(6, 6 + places):
        yield f"cap {tokens}", generation(PROMPT, choosing=GREEDY, max_tokens=tokens)
    yield "context", generation(PROMPT, choosing=GREEDY, max_tokens=8, capped_by_context=True)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_follow_up_turn_is_that_of_a_cold_process(kind: TinyKind, tmp_path: Path) -> None:
    """Turn 2 = turn 1 + reply + new text, for every way that turn 1 can end and every position of a burst."""
    async with pair(tmp_path, kind, loose=kind in LOOSE) as both:
        await follow_ups(both, BURST + 1 if kind in THOROUGH else 1)


@pytest.mark.parametrize("bits", [4, 8])
async def test_a_follow_up_turn_with_quantised_rows(bits: int, tmp_path: Path) -> None:
    async with pair(tmp_path, "llama", kv_bits=bits, kv_group_size=32) as both:
        await follow_ups(both, 2)


async def follow_ups(both: Pair, places: int) -> None:
    plain = await complete(both.cold, generation(PROMPT, choosing=GREEDY, max_tokens=30))
    truth = [*PROMPT, *plain.ids]
    scripts = {"plain": None, "right": knowing(truth), "wrong": knowing(truth, wrong=True)}
    numbers = itertools.count()
    for (end, wanted), (drafter, script) in itertools.product(ends(plain, places), scripts.items()):
        if places < BURST and drafter == "plain" and not end.startswith("end_ids"):
            continue
        salted = replace(fixed(wanted, BURST if script else 0), cache_salt=f"{next(numbers)}")
        await follow_up(both, salted, script)
    for gone in (len(PROMPT), len(PROMPT) + 6):
        salted = replace(fixed(generation(PROMPT, choosing=GREEDY, max_tokens=12), BURST), cache_salt=f"lost {gone}")
        await follow_up(both, salted, knowing(truth, lost_at=gone))
    for tokens in (1, 4, 9):
        salted = replace(fixed(generation(PROMPT, max_tokens=28), BURST), cache_salt=f"cancel {tokens}")
        await follow_up(both, salted, knowing(truth), cancel_after=tokens)


async def follow_up(both: Pair, first: Generation, script: Script | None, cancel_after: int | None = None) -> None:
    both.warm.scheduler.open_source = lambda _: ScriptedSource(script) if script else NoDrafts()
    request = both.warm.submit(first)
    if cancel_after is None:
        await drain(request)
    else:
        await cancelled(both.warm, request, cancel_after)
    assert request.cached_tokens == 0
    text = [*request.ledger.ids, 17, 230, 99]
    both.warm.scheduler.open_source = lambda _: NoDrafts()
    second = generation(text, choosing=GREEDY, max_tokens=5)
    # The last token of turn 1 was emitted and never fed, so it is not in the entry; where an end token came, that is the one.
    kept = len(request.ledger.ids) - int(not request.ledger.ended_by_token)
    await both.agree(replace(second, cache_salt=first.cache_salt), cached=kept)


async def cancelled(target: Target, request: Request, tokens: int) -> None:
    """Reads so many tokens, then leaves."""
    read = 0
    while read < tokens:
        outcome = await request.outbox.get()
        read += len(outcome.tokens) if isinstance(outcome, Released) else 0
    target.scheduler.cancel(request)
    # It leaves at the next tick, before this one is admitted.
    await complete(target, replace(generation([1]), cache_disabled=True))


@pytest.mark.parametrize("kind", ["llama", "gemma3", "qwen3_next", "llama4", "recurrent_gemma"])
async def test_a_text_that_parts_from_a_kept_one_anywhere_is_right(kind: TinyKind, tmp_path: Path) -> None:
    """Past windows' slack too. Rows serve any of their prefixes; a state what it reaches back to, else the next time."""
    async with pair(tmp_path, kind) as both:
        long = [(11 * i * i + 5 * i) % 256 for i in range(300)]
        await both.agree(generation(long, choosing=GREEDY, max_tokens=8), cached=0)
        for place in (299, 290, 170, 65, 64, 33, 32, 31, 1):
            for turn in range(2):
                text = [*long[:place], (long[place] + 1 + turn) % 256, 3, 4]
                request = await both.agree(generation(text, choosing=GREEDY, max_tokens=3))
                if kind == "llama" or (turn == 1 and place >= 64):
                    assert request.cached_tokens == place
                assert request.cached_tokens <= place
        # The whole of a kept text: its last token stays pending.
        request = await both.agree(generation(long, choosing=GREEDY, max_tokens=3), cached=299)
        assert request.times.prefill_s > 0


@dataclass(slots=True)
class Talk:
    """One conversation."""

    salt: str
    text: list[int]
    turns: int = 0


@pytest.mark.parametrize(
    ("kind", "memory", "disk"),
    [
        ("llama", 1 << 30, False),
        ("llama", 150_000, True),
        ("gemma3", 900_000, True),
        ("qwen3_next", 500_000, True),
        ("lfm2", 120_000, False),
    ],
)
async def test_conversations_in_company_never_show_each_others_text(
    kind: TinyKind, memory: int, disk: bool, tmp_path: Path
) -> None:
    """Three tenants, shared system prompts, random ends, drafts, cancellations and evictions, all at once."""
    dice = random.Random(f"{kind}/{memory}")
    systems = [[dice.randrange(256) for _ in range(size)] for size in (40, 75)]
    async with pair(
        tmp_path, kind, prompt_cache_bytes=memory, prompt_cache_dir=tmp_path / "kept" if disk else None
    ) as both:
        talks = [
            Talk(salt, [*dice.choice(systems), *(dice.randrange(256) for _ in range(9))]) for salt in ("a", "b", "") * 3
        ]

        async def hold(talk: Talk) -> None:
            own = random.Random(f"{talk.salt}{talk.text}")
            for _ in range(4):
                choosing = own.choice([GREEDY, DRAWN])
                wanted = generation(talk.text, choosing=choosing, max_tokens=own.randrange(1, 14))
                wanted = replace(fixed(wanted, own.choice([0, 3])), cache_salt=talk.salt)
                expected = await complete(both.cold, fixed(wanted, 0))
                request = both.warm.submit(wanted)
                assert (await drain(request)).visible == expected.visible
                talk.text += [*expected.ids, *(own.randrange(256) for _ in range(5))]

        both.warm.scheduler.open_source = half_right
        await asyncio.gather(*(hold(talk) for talk in talks))
        assert both.warm.prefixes is not None
        counts = both.warm.prefixes.snapshot()
        assert counts.hits > 0
        assert counts.memory_bytes <= memory
        assert (counts.memory_evictions > 0) == (memory < 1 << 30)
        assert (counts.disk_reads > 0) == disk


def half_right(request: Request) -> DraftSource:
    dice = random.Random(len(request.generation.prompt))
    return ScriptedSource(lambda ids, drafts: [ids[-1 - dice.randrange(2)] for _ in range(abs(drafts))])


@pytest.mark.parametrize("kind", ["llama", "qwen3_next"])
async def test_tenants_share_nothing(kind: TinyKind, tmp_path: Path) -> None:
    """Another salt, no salt and another owner are all strangers; equal ones are not."""
    async with pair(tmp_path, kind) as both:
        wanted = generation(PROMPT, choosing=GREEDY, max_tokens=3)
        tenants = [("", ""), ("a", ""), ("", "a"), ("a", "a"), ("ab", ""), ('a","', "")]
        for expected in (0, len(PROMPT) - 1):
            for salt, owner in tenants:
                await both.agree(replace(wanted, cache_salt=salt, owner=owner), cached=expected)


async def test_a_request_may_opt_out(tmp_path: Path) -> None:
    """It neither reads nor fills."""
    async with pair(tmp_path, "llama") as both:
        assert both.warm.prefixes is not None
        wanted = generation(PROMPT, choosing=GREEDY, max_tokens=3)
        await both.agree(replace(wanted, cache_disabled=True), cached=0)
        assert both.warm.prefixes.counts.memory_entries == 0
        await both.agree(wanted, cached=0)
        held = both.warm.prefixes.snapshot()
        await both.agree(replace(wanted, cache_disabled=True), cached=0)
        await both.agree(replace(generation(PROMPT[:40], max_tokens=3), cache_disabled=True), cached=0)
        assert both.warm.prefixes.snapshot() == held


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
async def test_exact_numerics_reuse_whole_chunks_of_prefilled_rows_only(kind: TinyKind, tmp_path: Path) -> None:
    """What decoding wrote, and the odd end of a prompt, are neither kept nor reused."""
    chunk = 24
    async with pair(tmp_path, kind, prefill_step_size=chunk, numerics="exact") as both:
        first = await both.agree(generation(PROMPT, choosing=GREEDY, max_tokens=40), cached=0)
        aligned = (len(PROMPT) - 1) // chunk * chunk
        turn = [*first.ledger.ids, 1, 2]
        await both.agree(generation(turn, choosing=GREEDY, max_tokens=3), cached=aligned)
        # That read the reply as a prompt, so now it counts.
        longer = [*turn, 5, 6]
        await both.agree(generation(longer, max_tokens=3), cached=(len(turn) - 1) // chunk * chunk)
        assert both.warm.prefixes is not None
        for block in both.warm.prefixes._memory._items.values():
            end = getattr(block, "length", None) or block.begin + len(block.ids)
            assert end % chunk == 0 or end % BLOCK == 0
            assert end <= (len(longer) - 1) // chunk * chunk


@pytest.mark.parametrize("kind", ["llama", "gemma3", "qwen3_next", "recurrent_gemma", "deepseek_v32"])
async def test_what_is_on_disk_serves_after_a_restart(kind: TinyKind, tmp_path: Path) -> None:
    loose = kind in LOOSE
    kept = tmp_path / "kept"
    async with pair(tmp_path, kind, prompt_cache_dir=kept) as both:
        request = both.warm.submit(generation(PROMPT, choosing=GREEDY, max_tokens=9))
        await drain(request)
    turn = [*request.ledger.ids, 1, 2, 3]
    async with pair(tmp_path, kind, loose=loose, prompt_cache_dir=kept) as both:
        assert both.warm.prefixes is not None
        assert both.warm.prefixes.counts.disk_entries > 0
        await both.agree(generation(turn, choosing=GREEDY, max_tokens=6), cached=len(request.ledger.ids) - 1)
        counts = both.warm.prefixes.snapshot()
        assert counts.disk_reused_tokens == counts.reused_tokens == len(request.ledger.ids) - 1
        assert counts.disk_dropped == counts.disk_errors == 0
    # Another model, a changed one and another format of the cache find nothing of it.
    save_tiny_model(tmp_path / "other" / kind, kind, 8, context_length=1024, sliding_window=16)
    async with pair(tmp_path / "other", kind, loose=loose, prompt_cache_dir=kept) as both:
        await both.agree(generation(turn, choosing=GREEDY, max_tokens=3), cached=0)


async def test_a_damaged_file_costs_what_lies_behind_it_and_nothing_else(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    async with pair(tmp_path, "llama", prompt_cache_dir=kept) as both:
        await drain(both.warm.submit(generation([*PROMPT, *PROMPT], max_tokens=2)))
    files = sorted(kept.glob("*/*.safetensors"), key=lambda path: path.stat().st_mtime_ns)
    assert len(files) == len(PROMPT) * 2 // BLOCK + 1
    # Last used first: the beginning of a text counts as used after its end.
    third = files[-3]
    content = bytearray(third.read_bytes())
    content[len(content) // 2] ^= 1
    third.write_bytes(content)
    async with pair(tmp_path, "llama", prompt_cache_dir=kept) as both:
        await both.agree(generation([*PROMPT, *PROMPT], choosing=GREEDY, max_tokens=2), cached=2 * BLOCK)
        assert both.warm.prefixes is not None
        assert both.warm.prefixes.counts.disk_dropped == 1
    async with pair(tmp_path, "llama", prompt_cache_dir=kept) as both:
        await both.agree(generation([*PROMPT, *PROMPT], choosing=GREEDY, max_tokens=2), cached=4 * BLOCK)
