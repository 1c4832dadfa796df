"""As many different user turns as a benchmark needs, so that no server answers from a memory of an earlier one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import permutations

from benchmarks.prompts import COPY_HEAVY

_ASKS = (
    "Explain {} to a child.",
    "Write a short paragraph about {}.",
    "What should a beginner know about {}?",
    "Give me three facts about {}, each in one sentence.",
)
_TOPICS = (
    "volcanoes", "the water cycle", "bicycles", "sleep", "bread baking", "the moon", "honey bees", "sailing",
    "chess", "glaciers", "the printing press", "coral reefs", "gardening", "thunderstorms", "maps", "the human heart",
    "clocks", "desert animals", "paper", "bridges", "migrating birds", "coffee", "lighthouses", "the violin",
)  # fmt: skip


def chats() -> Iterator[str]:
    """Everyday questions: 96 different ones."""
    for turn in range(len(_ASKS)):
        for number, topic in enumerate(_TOPICS):
            yield _ASKS[(number + turn) % len(_ASKS)].format(topic)


def copies() -> Iterator[str]:
    """Copy-heavy turns, 42 different ones: five sentences in a row of our texts, about as long as an answer may be."""
    bodies = [turn.partition("\n\n")[2] for turn in COPY_HEAVY.values()]
    texts: dict[str, None] = {}
    for order in permutations([body for body in bodies if "\n" not in body]):
        sentences = [sentence for body in order for sentence in re.split(r"(?<=\.) ", body)]
        texts |= dict.fromkeys(" ".join([*sentences, *sentences][at : at + 5]) for at in range(len(sentences)))
    for ask in ("Repeat the following text exactly, word for word:", "Copy this text exactly as it is:"):
        yield from (f"{ask}\n\n{text}" for text in texts)
