"""As many different user turns as a benchmark needs, so that no server answers from a memory of an earlier one."""

from __future__ import annotations

import re
from collections.abc import Iterator

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
    """Copy-heavy turns: the sentences or lines of each text in another order, as often as it has some."""
    for turn in range(4):
        for text in COPY_HEAVY.values():
            ask, _, body = text.partition("\n\n")
            separator = "\n" if "\n" in body else " "
            parts = body.split("\n") if "\n" in body else re.split(r"(?<=\.) ", body)
            yield f"{ask}\n\n{separator.join(parts[turn:] + parts[:turn])}"
