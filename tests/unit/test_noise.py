"""The noise: golden values from the written formula, and what makes it noise."""

from __future__ import annotations

import math
import re
import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwire import noise
from draftwire.sampling import Sampler, draw_ids

PAGE = Path(__file__).parents[2] / "docs" / "noise.md"
WORD = 0xFFFFFFFF
GOLDEN = [
    # seed, step, id, key1, key2, hash, gumbel
    (0, 0, 0, 1680814304, 1238780610, 49623764, 4.4549244),
    (0, 0, 1, 1680814304, 1238780610, 3270187055, -0.3597462),
    (0, 1, 0, 4215923267, 2139939529, 3092676191, -0.2415451),
    (1, 0, 0, 3584742034, 3694705582, 456597918, 2.1857242),
    (7, 3, 49151, 1990693206, 1321122506, 3749620469, -0.7245379),
    (3, 641, 5524, 403183037, 2267983397, 39, 18.5044091),
    (3, 633, 47463, 2766219784, 2302890810, 4294967252, -2.8115409),
    (42, 0, 2, 1066519350, 2878733994, 1483875052, 0.8583265),
    (42, 511, 151935, 2885894537, 2747081276, 1846252773, 0.5764656),
    (2**32 - 1, 0, 5, 2152607557, 4028452829, 313550307, 2.5795758),
    (2**32, 0, 5, 4162723709, 4264252932, 3452498016, -0.4878816),
    (0x0123456789ABCDEF, 1000, 12345, 3040852702, 3464326675, 3945818862, -0.9201641),
    (2**64 - 1, 2**32 - 1, 262143, 2755072530, 4063882423, 2117885253, 0.3864591),
]
EDGES = {
    0: 22.8738570,
    1: 21.7752447,
    16777215: 5.5432211,
    16777217: 5.5432211,
    2147483648: 0.3665129,
    4294967167: -2.8115409,
    4294967295: -2.8115409,
}
MIXED = {0: 0, 1: 1364076727, 0xDEADBEEF: 233162409, 0xFFFFFFFF: 2180083513}

Floats = npt.NDArray[np.float64]


# The formula once more, written from the page and not from the module.
def page_mix(x: int) -> int:
    x = x ^ (x >> 16)
    x = x * 0x85EBCA6B % 2**32
    x = x ^ (x >> 13)
    x = x * 0xC2B2AE35 % 2**32
    return x ^ (x >> 16)


def page_key(seed: int, step: int, salt: int) -> int:
    return page_mix(page_mix(page_mix(salt ^ seed % 2**32) ^ seed // 2**32) ^ step)


def page_hash(seed: int, step: int, token: int) -> int:
    return page_mix(page_mix(token ^ page_key(seed, step, 0x9E3779B9)) ^ page_key(seed, step, 0x7F4A7C15))


def single(x: float) -> float:
    """Rounded to float32."""
    (rounded,) = struct.unpack("<f", struct.pack("<f", x))
    return float(rounded)


def page_gumbel(hashed: int) -> float:
    v = min(single(single(single(hashed) + 0.5) * 2.0**-32), 1 - 2.0**-24)
    return -math.log(-math.log1p(-v))


def rows_of(page: str, columns: int) -> list[list[str]]:
    """The number rows of the page's tables with so many columns."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("|")]
    return [row for row in rows if len(row) == columns and re.fullmatch(r"\d+", row[0])]


def gumbels(seed: int, steps: list[int], width: int) -> Floats:
    return np.array(noise.gumbel([noise.step_keys(seed, step) for step in steps], width), dtype=np.float64)


def test_golden_values_follow_from_the_written_formula() -> None:
    for seed, step, token, key1, key2, hashed, value in GOLDEN:
        assert (page_key(seed, step, 0x9E3779B9), page_key(seed, step, 0x7F4A7C15)) == (key1, key2)
        assert page_hash(seed, step, token) == hashed
        assert page_gumbel(hashed) == pytest.approx(value, abs=1e-7)
    for hashed, value in EDGES.items():
        assert page_gumbel(hashed) == pytest.approx(value, abs=1e-7)
    assert {x: page_mix(x) for x in MIXED} == MIXED


@pytest.mark.parametrize("row", GOLDEN)
def test_the_module_gives_the_golden_values(row: tuple[int, int, int, int, int, int, float]) -> None:
    seed, step, token, key1, key2, hashed, value = row
    keys = noise.step_keys(seed, step)
    assert keys == (key1, key2)
    assert noise.hash_id(keys, token) == hashed
    assert noise.hashes([keys], token + 1)[0, token].item() == hashed
    assert noise.gumbel([keys], token + 1)[0, token].item() == pytest.approx(value, abs=1e-6)


def test_the_page_holds_the_golden_values() -> None:
    """The documentation cannot drift: its tables are these values, digit for digit."""
    page = PAGE.read_text(encoding="utf-8")
    written = [(*map(int, row[:6]), float(row[6])) for row in rows_of(page, 7)]
    assert written == GOLDEN
    assert {int(hashed): float(value) for hashed, value in rows_of(page, 2)} == EDGES
    named = {int(x, 0): int(y) for x, y in re.findall(r"`mix\((\w+)\) = (\d+)`", page)}
    assert named == MIXED
    assert "version 1" in page
    assert noise.NOISE_VERSION == 1


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_python_and_formula_agree(seed: int, step: int, token: int) -> None:
    assert noise.hash_id(noise.step_keys(seed, step), token) == page_hash(seed, step, token)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(1, 300))
def test_mlx_and_formula_agree(seed: int, step: int, width: int) -> None:
    keys = [noise.step_keys(seed, step)]
    found = [int(value) for value in np.array(noise.hashes(keys, width))[0]]
    assert found == [page_hash(seed, step, token) for token in range(width)]
    expected = [page_gumbel(hashed) for hashed in found]
    assert np.array(noise.gumbel(keys, width))[0].tolist() == pytest.approx(expected, abs=2e-6)


def test_mix_is_a_bijection_on_a_sample_and_stays_inside_32_bits() -> None:
    mixed = {noise.mix(x) for x in range(50_000)} | {noise.mix(WORD - x) for x in range(50_000)}
    assert len(mixed) == 100_000
    assert all(0 <= x <= WORD for x in mixed)


@pytest.mark.parametrize(("narrow", "wide"), [(49_152, 49_280), (151_936, 152_064), (1, 7)])
def test_padded_heads_share_every_value(narrow: int, wide: int) -> None:
    """Kind of fault: noise drawn as one vector shares no value between heads of another width."""
    keys = [noise.step_keys(99, step) for step in (0, 5)]
    short, long = np.array(noise.gumbel(keys, narrow)), np.array(noise.gumbel(keys, wide))
    assert short.tobytes() == np.ascontiguousarray(long[:, :narrow]).tobytes()


def test_a_row_does_not_depend_on_the_other_rows() -> None:
    """Kind of fault: another algorithm for one row than for many. Alone, in any batch, in any order: the same bits."""
    alone = {step: gumbels(5, [step], 1000)[0].tobytes() for step in range(9)}
    for steps in ([0, 1], [3, 2, 1], list(range(9)), [8] * 5, [4, 0, 4]):
        together = gumbels(5, steps, 1000)
        assert [row.tobytes() for row in together] == [alone[step] for step in steps]


def test_every_value_is_finite() -> None:
    values = gumbels(3, list(range(20)), 50_000)
    assert np.isfinite(values).all()
    assert values.min() >= -2.8116
    assert values.max() <= 22.874


def test_hashes_are_uniform() -> None:
    """Chi-square over 256 bins of the high and of the low byte, a million hashes; the seeds are fixed, so is the result."""
    hashes = np.array(noise.hashes([noise.step_keys(17, step) for step in range(20)], 50_000)).ravel()
    for shift in (0, 8, 16, 24):
        counts = np.bincount((hashes >> shift) & 0xFF, minlength=256)
        expected = hashes.size / 256
        # 255 degrees of freedom: mean 255, standard deviation 22.6.
        assert ((counts - expected) ** 2 / expected).sum() < 255 + 5 * 22.6


def test_gumbel_values_have_the_moments_of_the_distribution() -> None:
    values = gumbels(23, list(range(20)), 50_000)
    assert values.mean() == pytest.approx(0.5772157, abs=0.006)
    assert values.std() == pytest.approx(math.pi / math.sqrt(6), abs=0.006)


def correlation(one: Floats, other: Floats) -> float:
    return float(np.corrcoef(one.ravel(), other.ravel())[0, 1])


def test_neighbouring_steps_seeds_and_ids_are_not_correlated() -> None:
    """200,000 pairs each: a correlation beyond .01 would be more than four standard deviations."""
    steps = gumbels(1, list(range(201)), 1000)
    assert abs(correlation(steps[:-1], steps[1:])) < 0.01
    assert abs(correlation(steps[:, :-1], steps[:, 1:])) < 0.01
    seeds = np.stack([gumbels(seed, [4], 1000)[0] for seed in range(201)])
    assert abs(correlation(seeds[:-1], seeds[1:])) < 0.01
    high = np.stack([gumbels(seed << 32, [4], 1000)[0] for seed in range(201)])
    assert abs(correlation(high[:-1], high[1:])) < 0.01
    assert abs(correlation(seeds[1:], high[1:])) < 0.01
    # Step s of seed n against step s + 1 of seed n - 1: no diagonal either.
    assert abs(correlation(gumbels(7, list(range(200)), 1000), gumbels(6, list(range(1, 201)), 1000))) < 0.01


def test_no_two_steps_or_seeds_share_their_noise() -> None:
    keys = {noise.step_keys(seed, step) for seed in range(60) for step in range(60)}
    keys |= {noise.step_keys(seed << 32, step) for seed in range(1, 60) for step in range(60)}
    assert len(keys) == 60 * 60 + 59 * 60


LOGITS = [2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0, 1.5]


def frequencies(sampler: Sampler, draws: int = 20_000) -> npt.NDArray[np.int64]:
    import mlx.core as mx

    counts = np.zeros(len(LOGITS), dtype=np.int64)
    for begin in range(0, draws, 5_000):
        ids = draw_ids(mx.array([LOGITS] * 5_000), sampler, range(begin, begin + 5_000))
        counts += np.bincount(ids, minlength=len(LOGITS))
    return counts


def chi_square(counts: npt.NDArray[np.int64], weights: Floats) -> tuple[float, int]:
    """(statistic, degrees of freedom) against probabilities in proportion to the weights."""
    expected = counts.sum() * weights / weights.sum()
    assert (counts[expected == 0] == 0).all(), "a token without weight was drawn"
    some = expected > 0
    return float(((counts[some] - expected[some]) ** 2 / expected[some]).sum()), int(some.sum()) - 1


@pytest.mark.parametrize("seed", [0, 12345])
@pytest.mark.parametrize("temperature", [0.4, 0.7, 1.0, 1.5, 4.0])
def test_draws_follow_softmax_at_a_temperature(temperature: float, seed: int) -> None:
    weights = np.exp(np.array(LOGITS) / temperature)
    found, freedom = chi_square(frequencies(Sampler(temperature=temperature, seed=seed)), weights)
    # 7 degrees of freedom: above 24.3 once in a thousand.
    assert freedom == 7
    assert found < 24.3


@pytest.mark.parametrize(
    ("sampler", "kept"),
    [
        (Sampler(temperature=1.0, top_k=3, seed=5), {0, 7, 1}),
        (Sampler(temperature=0.7, top_p=0.6, seed=5), {0, 7}),
        (Sampler(temperature=1.5, min_p=0.2, seed=5), {0, 7, 1, 2}),
        (Sampler(temperature=1.0, top_p=0.95, top_k=4, min_p=0.1, seed=5), {0, 7, 1, 2}),
    ],
    ids=["top_k", "top_p", "min_p", "all"],
)
def test_filtered_draws_follow_softmax_over_what_is_kept(sampler: Sampler, kept: set[int]) -> None:
    weights = np.exp(np.array(LOGITS) / sampler.temperature)
    weights[[token for token in range(len(LOGITS)) if token not in kept]] = 0.0
    found, freedom = chi_square(frequencies(sampler), weights)
    assert freedom == len(kept) - 1
    # Above 16.3 once in a thousand with 3 degrees of freedom, and rarer with fewer.
    assert found < 16.3
