"""The text of a stream, built from the bytes of single tokens, on the tokenizer and the ids of SmolLM2."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import pytest

from draftwire.compute import ComputeThread
from draftwire.models import is_pulled, model_path
from draftwire.tokenizer import Tokenizer
from target_service.accept import accept
from target_service.ledger import Ledger
from target_service.params import Stopping

pytestmark = pytest.mark.model

MODEL = "smollm2-135m"
TEXTS = (
    " Paris",
    "  two spaces, then\n\n  two more \t and a tab ",
    "   ",
    "def f(x):\n    return x  # four spaces\n\n\nprint(f(1))\n",
    "naïve café, Ångström, Œuvre, straße, \u00a0no-break",
    "Съешь ещё этих мягких французских булок",
    "いろはにほへと ちりぬるを, 天地玄黃 宇宙洪荒",
    "שלום עולם, مرحبا بالعالم",
    "family 👨‍👩‍👧‍👦, flags 🇫🇷🇯🇵, 𝔘𝔫𝔦𝔠𝔬𝔡𝔢",
    "e\u0301 combining, \u200bzero width, \ufeffmark, \u2028line",
    "don't can 't  . , ! ? it 's",
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    if not is_pulled(MODEL):
        pytest.skip(f"the default model is not here: run `draftwire models pull {MODEL}`")
    return Tokenizer(model_path(MODEL))


def streamed(tokenizer: Tokenizer, ids: Sequence[int], rounds: Iterable[int]) -> str:
    """What a client reads when rounds commit so many ids each; every chunk is valid text on its own."""
    ledger = Ledger([1], Stopping(max_tokens=len(ids)), tokenizer.piece_bytes)
    text, seen, start, finish = [], 0, 0, None
    for size in rounds:
        chunk = list(ids[start : start + size])
        if not chunk:
            break
        start += size
        done = ledger.commit(accept(chunk[:-1], chunk), None)
        finish = done.finish
        if done.released is not None:
            assert done.released.first_step == seen
            seen += len(done.released.tokens)
            text.append(done.released.text)
    assert finish is not None
    assert seen == len(ids)
    return "".join(text)


def sizes(noise: random.Random, total: int) -> list[int]:
    """Rounds of 1 to 8 ids."""
    found: list[int] = []
    while sum(found) < total:
        found.append(noise.randint(1, 8))
    return found


def test_every_id_alone_streams_what_it_decodes_to(tokenizer: Tokenizer) -> None:
    """All 49,152: leading spaces, parts of characters, special tokens."""
    wrong = [
        token_id
        for token_id in range(tokenizer.size)
        if tokenizer.piece_bytes(token_id).decode("utf-8", errors="replace") != tokenizer.decode([token_id], False)
    ]
    assert tokenizer.size == 49152
    assert wrong == []


def test_any_ids_in_any_rounds_stream_what_they_decode_to(tokenizer: Tokenizer) -> None:
    """Random ids are full of broken characters; a chunk never ends inside one."""
    noise = random.Random(17)
    for _ in range(400):
        ids = [noise.randrange(tokenizer.size) for _ in range(noise.randint(1, 60))]
        assert streamed(tokenizer, ids, sizes(noise, len(ids))) == tokenizer.decode(ids, False)


def test_ids_that_begin_with_a_space_keep_it_wherever_they_stand(tokenizer: Tokenizer) -> None:
    noise = random.Random(23)
    spaced = [i for i in range(tokenizer.size) if tokenizer.piece_bytes(i).startswith(b" ")]
    assert len(spaced) > 10_000
    for _ in range(200):
        ids = noise.sample(spaced, 12)
        text = streamed(tokenizer, ids, sizes(noise, len(ids)))
        assert text.startswith(" ")
        assert text == tokenizer.decode(ids, False)


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_comes_back_whole_for_any_rounds(tokenizer: Tokenizer, text: str) -> None:
    noise = random.Random(5)
    ids = tokenizer.encode(text, add_special_tokens=False)
    for rounds in ([1] * len(ids), [len(ids)], sizes(noise, len(ids))):
        assert streamed(tokenizer, ids, rounds) == text


def test_mlx_lms_own_ids_stream_with_their_leading_space(tokenizer: Tokenizer) -> None:
    """A raw completion goes on in the middle of a sentence: " Paris", where mlx-lm's own streaming says "Paris"."""
    compute = ComputeThread("oracle")
    try:
        ids = compute.submit(lambda: greedy(tokenizer.encode("The capital of France is", True), 12)).result(300)
    finally:
        compute.close()
    text = streamed(tokenizer, ids, [1] * len(ids))
    assert text.startswith(" Paris")
    assert text == tokenizer.decode(ids, False)


def greedy(prompt: list[int], tokens: int) -> list[int]:
    """mlx-lm's plain ids."""
    import mlx.core as mx
    from mlx_lm.generate import generate_step
    from mlx_lm.utils import load

    model = load(str(model_path(MODEL)))[0]
    return [int(token_id) for token_id, _ in generate_step(mx.array(prompt), model, max_tokens=tokens)]
