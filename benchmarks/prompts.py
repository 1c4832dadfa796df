"""Prompts whose answers repeat much of their input: what retrieval, editing and extraction look like."""

from __future__ import annotations

_STORY = (
    "The lighthouse stood on a narrow spit of rock at the northern end of the bay. Every evening the keeper climbed the "
    "one hundred and twelve steps to the lamp room, trimmed the wick, wound the clockwork that turned the great lens, and "
    "wrote the weather into a small green book. In winter the spray froze on the railings and the stairs grew slippery, so "
    "he tied a rope around his waist before he went out to clear the glass."
)
_RECIPE = (
    "Wash the lentils, put them into a pot with two cups of water, and bring the pot to a boil. Chop one onion and two "
    "carrots, fry them in a little oil until they are soft, and add them to the pot. Let the soup simmer for thirty minutes, "
    "stir it now and then, and season it with salt, pepper and the juice of half a lemon before you serve it."
)
_LIST = "\n".join(
    f"{number}. {name}, {city}"
    for number, (name, city) in enumerate(
        [("Ada Brandt", "Lisbon"), ("Tomas Keller", "Oslo"), ("Ines Duarte", "Porto"), ("Karl Voss", "Bremen"),
         ("Mira Novak", "Prague"), ("Jonas Lind", "Malmo"), ("Rosa Conti", "Turin"), ("Pavel Simek", "Brno")],
        start=1,
    )
)  # fmt: skip
_LETTER = (
    "Dear customer, thank you for your order of the ninth of May. The two lamps were shipped this morning and should reach "
    "you within four working days. If a lamp arrives broken, keep the box and the paper, take a photograph, and send it to "
    "our service desk. We will replace the lamp at no cost to you. With kind regards, the service team."
)

COPY_HEAVY = {
    "repeat a story": f"Repeat the following text exactly, word for word:\n\n{_STORY}",
    "repeat a recipe": f"Repeat the following recipe exactly, word for word:\n\n{_RECIPE}",
    "repeat a list": f"Copy this list exactly as it is:\n\n{_LIST}",
    "quote a letter": f"Repeat the following letter exactly, word for word:\n\n{_LETTER}",
}
"""name -> user turn"""
