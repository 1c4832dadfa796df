"""Requests whose answers are known beforehand, from plain runs, and what an answer must equal."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from draftwire.aio_client import AsyncClient
from draftwire.events import Completion

_WORDS = (
    *("time", "river", "stone", "light", "under", "garden", "winter", "letter", "answer", "machine", "silver", "quiet"),
    *("harbour", "paper", "signal", "window", "copper", "engine", "forest", "number", "shadow", "music", "bridge"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A request and what it must give, whatever else happens on the server."""

    request: Mapping[str, Any]
    visible: tuple[Any, ...]
    text: str


def visible(completion: Completion) -> tuple[Any, ...]:
    """Everything that neither drafts nor company may change."""
    finished = completion.finished
    return (
        completion.token_ids,
        completion.text,
        finished.finish_reason,
        finished.matched,
        (finished.usage.prompt_tokens, finished.usage.completion_tokens),
        tuple((token.logprob, token.top_logprobs) for token in completion.tokens),
    )


def requests(rng: random.Random, count: int) -> list[dict[str, Any]]:
    """Requests of all kinds: greedy and sampled, penalties, biases, stops, logprobs, chats, ids, short and long."""

    def prose(words: int) -> str:
        return " ".join(rng.choice(_WORDS) for _ in range(words))

    found: list[dict[str, Any]] = []
    for index in range(count):
        request: dict[str, Any] = {"max_tokens": rng.choice([4, 16, 48, 96]), "ignore_eos": rng.random() < 0.7}
        if rng.random() < 0.5:
            request |= {"temperature": rng.choice([0.3, 0.8, 1.2]), "seed": rng.randrange(2**32)}
            request |= rng.choice([{}, {"top_p": 0.9}, {"top_k": 40}, {"min_p": 0.05}])
        request |= rng.choice([{}, {}, {"repetition_penalty": 1.2}, {"logit_bias": {rng.randrange(40_000): 3.0}}])
        request |= rng.choice([{}, {}, {"stop": [" e", "ing"]}, {"top_logprobs": 3}])
        match index % 4:
            case 0:
                # A copied passage: lookup drafts agree with something.
                passage = prose(12)
                request["prompt"] = f"{passage}. {passage}. {passage}"
            case 1:
                request["messages"] = [{"role": "user", "content": prose(rng.choice([3, 30]))}]
            case 2:
                request["token_ids"] = [rng.randrange(40_000) for _ in range(rng.choice([1, 2, 20, 300]))]
            case _:
                request["prompt"] = prose(rng.choice([1, 8, 200]))
        found.append(request)
    return found


async def known(client: AsyncClient, wanted: list[dict[str, Any]]) -> list[Case]:
    """Runs each request alone and without drafts."""
    cases = []
    for request in wanted:
        completion = await client.complete(**request, drafting="off")
        cases.append(Case(request=request, visible=visible(completion), text=completion.text))
    return cases
