"""Timed completions: the same measure for our service and for mlx-lm."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

from draftwire.client import Client
from draftwire.events import Chunk, Finished


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """One completion as its reader saw it."""

    ids: tuple[int, ...]
    wall_s: float
    """From the request to the last token."""
    first_s: float
    """From the request to the first token."""
    finished: Finished | None = None

    @property
    def tokens_per_s(self) -> float:
        """All tokens over the whole time, prompt included."""
        return len(self.ids) / self.wall_s

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens after the first over the time after the first."""
        return (len(self.ids) - 1) / (self.wall_s - self.first_s)


def generate(
    client: Client,
    prompt_ids: list[int],
    *,
    max_tokens: int,
    drafting: Literal["auto", "off", "fixed"],
    drafts: int | None = None,
    ignore_eos: bool = False,
    cache: bool = True,
) -> Timed:
    """A greedy completion over gRPC, to its natural end (unless ignore_eos) or max_tokens."""
    ids: list[int] = []
    finished: Finished | None = None
    began_s = time.perf_counter()
    first_s = last_s = 0.0
    with client.generate(
        token_ids=prompt_ids,
        temperature=0.0,
        max_tokens=max_tokens,
        drafting=drafting,
        num_draft_tokens=drafts,
        ignore_eos=ignore_eos,
        cache=cache,
    ) as stream:
        for event in stream:
            if isinstance(event, Chunk):
                last_s = time.perf_counter() - began_s
                first_s = first_s or last_s
                ids.extend(token.id for token in event.tokens)
            elif isinstance(event, Finished):
                finished = event
    return Timed(ids=tuple(ids), wall_s=last_s, first_s=first_s, finished=finished)
