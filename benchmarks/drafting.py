"""Draft calls of 1, 2, 4 and 8 sessions at once: one forward for all against one by one; and what a remembered prefix saves."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

from rich.console import Console

from benchmarks.report import Report
from draftwire.blas import default_threads, load_blas

if TYPE_CHECKING:
    from draft_service.history import Advance
    from draft_service.rounds import Rounds
    from draft_service.sources.model import ModelSource
    from draftwire.compute import ComputeThread

MODEL = "smollm2-135m"
_SESSIONS: Final = (1, 2, 4, 8)
_DRAFTS: Final = 4
_ROUNDS: Final = 5
_REPEATS: Final = 2
_PROMPT: Final = 1000
_VERIFY_S: Final = 0.1
_OWNER: Final = "bench"
_Arm = Literal["auto", "off"]
_ARMS: Final[tuple[_Arm, ...]] = ("auto", "off")


@dataclass(slots=True)
class _Measured:
    rates: dict[tuple[_Arm, int], list[float]] = field(default_factory=dict)
    """(arm, sessions) -> drafted tokens a second, all together."""
    drafts: dict[tuple[_Arm, int], list[tuple[int, ...]]] = field(default_factory=dict)
    beside_ms: dict[_Arm, list[float]] = field(default_factory=dict)
    """A draft call while another session's prompt is read."""
    alone_ms: list[float] = field(default_factory=list)
    cold_ms: list[float] = field(default_factory=list)
    warm_ms: list[float] = field(default_factory=list)


def run(console: Console) -> Report:
    """Arms alternate; a figure is the median over repeats. Sessions' texts differ in length, and each round corrects the last
    draft, so that KV is rolled back."""
    threads = default_threads()
    load_blas("auto", threads=threads)
    return _report(asyncio.run(_measure(console)), threads)


async def _measure(console: Console) -> _Measured:
    from draft_service.sources.model import load_model_source
    from draftwire.compute import ComputeThread

    compute = ComputeThread()

    def load(arm: _Arm) -> ModelSource:
        return load_model_source(
            MODEL, dtype="auto", cache_dir=None, context_length=None, prefill_step_size=256, batching=arm
        )

    measured = _Measured()
    sources = {arm: await compute.run(lambda arm=arm: load(arm)) for arm in _ARMS}  # type: ignore[misc]
    for repeat in range(_REPEATS):
        console.print(f"drafting: run {repeat + 1} of {_REPEATS}")
        for count in _SESSIONS:
            for arm in _ARMS:
                async with _Desk(sources[arm], compute) as desk:
                    rate, drafts = await desk.side_by_side(count, seed=repeat)
                measured.rates.setdefault((arm, count), []).append(rate)
                measured.drafts.setdefault((arm, count), []).extend(drafts)
        for arm in _ARMS:
            async with _Desk(sources[arm], compute) as desk:
                alone, beside = await desk.beside_a_prompt()
            measured.beside_ms.setdefault(arm, []).extend(beside)
            if arm == "auto":
                measured.alone_ms.extend(alone)
        async with _Desk(sources["auto"], compute) as desk:
            cold, warm = await desk.follow_up(seed=repeat)
        measured.cold_ms.append(cold)
        measured.warm_ms.append(warm)
    for source in sources.values():
        await compute.run(source.close)
    await asyncio.to_thread(compute.close)
    return measured


class _Desk:
    """The draft service without its gRPC face."""

    def __init__(self, source: ModelSource, compute: ComputeThread) -> None:
        from draft_service.rounds import Rounds
        from draft_service.sessions import SessionLimits, SessionTable

        limits = SessionLimits(sessions=64, kv_bytes=2 * 1024**3, lease_s=600.0, max_lease_s=600.0)
        self._rounds: Rounds = Rounds(
            SessionTable(limits, time.monotonic),
            source,
            compute,
            time.monotonic,
            max_draft_tokens=16,
            prompt_cache_bytes=256 * 1024**2,
        )

    async def __aenter__(self) -> _Desk:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._rounds.close()

    async def side_by_side(self, count: int, *, seed: int) -> tuple[float, list[tuple[int, ...]]]:
        """Drafted tokens a second of so many sessions that ask at the same moment, and the drafts."""
        dice = random.Random(seed)
        talks = [_Talk(self._rounds, number, _ids(dice, 60 + 20 * number)) for number in range(count)]
        for talk in talks:
            await talk.open()
        await asyncio.gather(*(talk.round(dice) for talk in talks))
        began_s = time.perf_counter()
        drafts: list[tuple[int, ...]] = []
        for _ in range(_ROUNDS):
            drafts += await asyncio.gather(*(talk.round(dice) for talk in talks))
        seconds = time.perf_counter() - began_s
        return sum(map(len, drafts)) / seconds, drafts

    async def beside_a_prompt(self) -> tuple[list[float], list[float]]:
        """Milliseconds of draft calls alone, and of those while another session's prompt is read."""
        dice = random.Random(1)
        talk = _Talk(self._rounds, 0, _ids(dice, 60))
        await talk.open()
        alone = [await talk.timed(dice) for _ in range(6)][1:]
        reading = asyncio.ensure_future(_Talk(self._rounds, 1, _ids(dice, _PROMPT)).open())
        beside = []
        while not reading.done():
            beside.append(await talk.timed(dice))
            # The target verifies.
            await asyncio.sleep(_VERIFY_S)
        await reading
        return alone, beside

    async def follow_up(self, *, seed: int) -> tuple[float, float]:
        """Milliseconds of a Prefill of a long text, and of one that goes on from there."""
        dice = random.Random(seed)
        first = _Talk(self._rounds, 0, _ids(dice, _PROMPT))
        cold = await first.open()
        await first.round(dice)
        self._rounds.table.release(_OWNER, [first.name])
        await self._rounds.idle()
        return cold, await _Talk(self._rounds, 1, [*first.ids, *_ids(dice, 30)]).open()


class _Talk:
    """One session."""

    def __init__(self, rounds: Rounds, number: int, ids: list[int]) -> None:
        self.name = f"session-{number:012}"
        self.ids = ids
        self._rounds = rounds
        self._sent = len(ids)
        self._number = 0

    async def open(self) -> float:
        """Milliseconds of the Prefill."""
        from draft_service.history import History
        from draft_service.sources.base import SessionSpec
        from draftwire.sampling import Sampler

        spec = SessionSpec(
            prompt_length=len(self.ids), max_length=len(self.ids) + 512, sampler=Sampler(), end_ids=frozenset()
        )
        history = History()
        history.apply(_advance(self.ids, 0))
        began_s = time.perf_counter()
        await self._rounds.prefill(_OWNER, self.name, spec=spec, history=history, lease_s=None)
        return (time.perf_counter() - began_s) * 1e3

    async def round(self, dice: random.Random) -> tuple[int, ...]:
        """One draft, all but the last of which the target accepts."""
        from draft_service.calls import Round
        from draft_service.sources.base import Ask

        self._number += 1
        correction = dice.randrange(1000, 40_000)
        asked = Round(
            session_id=self.name,
            number=self._number,
            advance=_advance(self.ids, self._sent),
            ask=Ask(limit=_DRAFTS),
        )
        guess = (await self._rounds.draft(_OWNER, asked)).guess
        self._sent = len(self.ids)
        self.ids = [*self.ids, *guess.ids[:-1], correction]
        return guess.ids

    async def timed(self, dice: random.Random) -> float:
        """Milliseconds of a round."""
        began_s = time.perf_counter()
        await self.round(dice)
        return (time.perf_counter() - began_s) * 1e3


def _advance(ids: Sequence[int], base: int) -> Advance:
    from draft_service.history import Advance
    from draftwire.wire import prefix_hash

    return Advance(base_length=base, ids=tuple(ids[base:]), prefix_hash=prefix_hash(ids))


def _ids(dice: random.Random, count: int) -> list[int]:
    return [dice.randrange(1000, 40_000) for _ in range(count)]


def _report(measured: _Measured, threads: int) -> Report:
    rates = {key: statistics.median(values) for key, values in measured.rates.items()}
    ratios = {
        count: statistics.median(
            ours / theirs
            for ours, theirs in zip(measured.rates["auto", count], measured.rates["off", count], strict=True)
        )
        for count in _SESSIONS
    }
    pairs = [
        (ours, theirs)
        for count in _SESSIONS
        for ours, theirs in zip(measured.drafts["auto", count], measured.drafts["off", count], strict=True)
    ]
    figures: dict[str, float | int | str] = {
        **{f"batched_vs_one_by_one_{count}": round(ratio, 3) for count, ratio in ratios.items()},
        "batched_tokens_per_s_8": round(rates["auto", 8], 1),
        "one_by_one_tokens_per_s_8": round(rates["off", 8], 1),
        "draft_beside_a_prompt_ratio": round(
            statistics.median(measured.beside_ms["auto"]) / statistics.median(measured.alone_ms), 2
        ),
        "draft_beside_a_prompt_ratio_one_by_one": round(
            statistics.median(measured.beside_ms["off"]) / statistics.median(measured.alone_ms), 2
        ),
        "follow_up_prefill_ratio": round(
            statistics.median(warm / cold for warm, cold in zip(measured.warm_ms, measured.cold_ms, strict=True)), 4
        ),
        "cold_prefill_ms": round(statistics.median(measured.cold_ms), 1),
        "drafts_equal": f"{sum(ours == theirs for ours, theirs in pairs)} of {len(pairs)}",
    }
    return Report(
        name="drafting",
        figures=figures,
        setting={
            "model": MODEL,
            "dtype": "float32",
            "threads": threads,
            "drafts": _DRAFTS,
            "rounds": _ROUNDS,
            "prompt": _PROMPT,
        },
        columns=["sessions", "together, drafted tok/s", "one by one, drafted tok/s"],
        rows=[[str(count), f"{rates['auto', count]:.1f}", f"{rates['off', count]:.1f}"] for count in _SESSIONS],
        bars={
            "together": [rates["auto", count] for count in _SESSIONS],
            "one by one": [rates["off", count] for count in _SESSIONS],
        },
        groups=[f"{count} sessions" for count in _SESSIONS],
        unit="drafted tokens/s, all sessions",
    )
