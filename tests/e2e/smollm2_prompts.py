"""What the services and mlx-lm are both asked: eight kinds of work, from code to a text of about 400 tokens."""

from __future__ import annotations

from typing import Final

_LETTER: Final = (
    "Dear Anna, I promised to write as soon as we had settled in, and now three weeks have passed. The house stands at "
    "the end of a gravel road, between a field of barley and a small wood of birches. In the morning the fog lies over "
    "the field like milk in a bowl, and the first bus to town looks like a ship that has lost its way. The roof leaked "
    "during the first night. We put every pot we own on the floor of the attic, and in the morning Jonas mended the "
    "hole with tar and a piece of an old advertising board, so that our attic now praises a brand of soap. The school "
    "has two rooms and one teacher, Mrs. Lindqvist, who plays the accordion and knows the Latin name of every bird. "
    "Mia, who never wanted to get up before eight in the city, is at the door at seven, because whoever comes first may "
    "feed the hens. Work goes slowly. The workshop has light and a good floor, but the kiln came with a crack in its "
    "door, and the firm that built it wants to send a man to look at the crack before it will send a new door. Until "
    "then I throw bowls and plates and let them dry in rows, ninety so far. On Saturdays there is a market by the "
    "church. We sold eleven plates there, a jug, and by mistake the bowl in which I kept the change. People are "
    "friendly in a slow way: they look at you for a while, as if you were the weather, and then they bring you plums. "
    "In October the ferry will stop running on Sundays, so come before that if you can, and bring boots, a lamp, and "
    "the recipe for your walnut bread, which I have tried twice from memory and which was twice a brick. Your Clara"
)

PROMPTS: Final[tuple[tuple[str, str], ...]] = (
    (
        "copy",
        "Repeat this text word for word, twice: The quick brown fox jumps over the lazy dog near the river bank, while "
        "seven black crows sit on the old stone wall and watch the boats go by.",
    ),
    ("question", "Why does the sky look blue during the day and red in the evening?"),
    ("code", "Write a Python function that merges two sorted lists into one sorted list, and explain how it works."),
    ("story", "Write a short story about a lighthouse keeper who finds a letter in a bottle."),
    ("list", "List ten fruits, one a line, each with its usual colour."),
    (
        "translation",
        "Translate into French: The train to the coast leaves at nine, and my brother waits at the station.",
    ),
    (
        "arithmetic",
        "A box holds 12 eggs. How many eggs are in 7 boxes, and how many are left after selling 30? Show each step.",
    ),
    (
        "long",
        f"Read this letter, then say who wrote it and what went wrong with the house and the workshop.\n\n{_LETTER}",
    ),
)
"""(kind, text of the user's message). The first ones are used where not all are: what copies its prompt is among them."""
