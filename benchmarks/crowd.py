"""Closed loops of many streams: each stream asks for its next completion when its last one has ended."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from draftwire.client import Client
from draftwire.events import Chunk, Finished


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One streamed completion as its reader saw it."""

    text: str
    tokens: int
    """Completion tokens, as the server counted them."""
    prompt_tokens: int
    arrivals_s: tuple[float, ...]
    """When each piece of text came, from the request on."""


Read = Callable[[str], Reading]
"""Takes a user turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crowd:
    """What all streams of one closed loop saw together."""

    readings: tuple[Reading, ...]
    """One a user turn, in the order of the turns."""
    wall_s: float

    @property
    def tokens_per_s(self) -> float:
        """Completion tokens of all streams over the wall time, prompts included."""
        return sum(reading.tokens for reading in self.readings) / self.wall_s

    def first_s(self, share: float) -> float:
        """Quantile of the time to the first text."""
        return _quantile([reading.arrivals_s[0] for reading in self.readings if reading.arrivals_s], share)

    def gap_s(self, share: float) -> float:
        """Quantile of the time between two pieces of text of one stream."""
        gaps = [
            later - earlier
            for reading in self.readings
            for earlier, later in zip(reading.arrivals_s, reading.arrivals_s[1:], strict=False)
        ]
        return _quantile(gaps, share)


def closed_loop(read: Read, turns: Sequence[str], streams: int) -> Crowd:
    """Runs all turns over `streams` threads; raises what a reader raised."""
    left = iter(enumerate(turns))
    lock = threading.Lock()
    readings: dict[int, Reading] = {}
    errors: list[BaseException] = []

    def stream() -> None:
        while not errors:
            with lock:
                number, turn = next(left, (None, ""))
            if number is None:
                return
            try:
                readings[number] = read(turn)
            except BaseException as error:
                errors.append(error)

    threads = [threading.Thread(target=stream) for _ in range(streams)]
    began_s = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wall_s = time.perf_counter() - began_s
    if errors:
        raise errors[0]
    return Crowd(readings=tuple(readings[number] for number in range(len(turns))), wall_s=wall_s)


def reader(client: Client, *, max_tokens: int, drafting: Literal["auto", "off"], tenant: str) -> Read:
    """Reads greedy chat completions of our service. tenant: those of another one share no remembered prompts with it."""

    def read(user_turn: str) -> Reading:
        text, arrivals_s = "", []
        finished: Finished | None = None
        began_s = time.perf_counter()
        messages = [{"role": "user", "content": user_turn}]
        with client.generate(
            messages=messages, temperature=0.0, max_tokens=max_tokens, drafting=drafting, cache_salt=tenant
        ) as stream:
            for event in stream:
                if isinstance(event, Chunk) and event.text:
                    arrivals_s.append(time.perf_counter() - began_s)
                    text += event.text
                elif isinstance(event, Finished):
                    finished = event
        assert finished is not None
        usage = finished.usage
        return Reading(
            text=text,
            tokens=usage.completion_tokens,
            prompt_tokens=usage.prompt_tokens,
            arrivals_s=tuple(arrivals_s),
        )

    return read


def _quantile(values: Sequence[float], share: float) -> float:
    """Nearest rank; 0 without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else 0.0


def median_ratio(ours: Sequence[Crowd], theirs: Sequence[Crowd]) -> float:
    """Median over repeats of tokens/s, ours over theirs."""
    return round(statistics.median(a.tokens_per_s / b.tokens_per_s for a, b in zip(ours, theirs, strict=True)), 3)
