"""The oracle: what mlx-lm computes on the same weights, in this process, and the rule by which ids are held against it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from smollm2_fixture import DrafterName, Scale
from smollm2_prompts import PROMPTS

from draftwire.blas import load_blas, load_blas_from_env
from draftwire.compute import ComputeThread
from draftwire.noise import gumbel, step_keys
from draftwire.sampling import Sampler

NEAR_TIE: Final = 1e-4
"""OpenBLAS sums in another order for another number of rows: where the two best are closer, either is right."""
_ORACLE_S: Final = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """What the oracle chose at each step, and how close a call it was. One entry a step."""

    ids: tuple[int, ...]
    seconds: tuple[int, ...]
    """The best id but for the chosen one."""
    gaps: tuple[float, ...]
    """Score of the chosen id minus that of the second."""
    logprobs: tuple[float, ...]
    """Of the chosen id, before filters."""


@dataclass(frozen=True, slots=True)
class NearTie:
    """A first difference that the rule allows."""

    step: int
    gap: float


def compare(got: Sequence[int], want: Reference, label: str) -> NearTie | None:
    """Asserts equal ids, or a first difference where the second best was taken and is within 1e-4 of the best."""
    assert 0 < len(got) <= len(want.ids), f"{label}: {len(got)} ids, the oracle has {len(want.ids)}"
    for step, token_id in enumerate(got):
        if token_id != want.ids[step]:
            gap = want.gaps[step]
            found = f"{label}: step {step} is {token_id}, mlx-lm has {want.ids[step]} (gap of the two best {gap:.3g})"
            assert gap < NEAR_TIE, found
            assert token_id == want.seconds[step], f"{found}, and {want.seconds[step]} as the second"
            return NearTie(step, gap)
    return None


class Oracle:
    """mlx-lm on the same weights with the same BLAS and one thread. Each reference is computed once, in the background."""

    def __init__(self, target: Path, cut: Path, scale: Scale) -> None:
        """Queues every greedy reference, in the order in which the tests ask for them."""
        self.scale = scale
        self._compute = ComputeThread("oracle")
        self._models: dict[str, Any] = {}
        self._prompts: list[list[int]] = []
        self.tokenizer: Any = None
        self._loaded = self._compute.submit(lambda: self._load(target, cut))
        self._plain = [self._queue(prompt, "self", 0, scale.greedy(prompt)) for prompt in range(len(PROMPTS))]
        drafters: tuple[DrafterName, ...] = ("self", "cut")
        self._speculative = {
            (drafter, drafts, prompt): self._queue(prompt, drafter, drafts, scale.speculative(drafter))
            for drafter in drafters
            for drafts in (2, 3)
            for prompt in scale.prompts(drafts)
        }

    def close(self) -> None:
        """Gives up what nobody asked for, and ends the thread."""
        for future in (*self._plain, *self._speculative.values()):
            future.cancel()
        self._compute.submit(self._models.clear)
        self._compute.close()

    def prompt(self, index: int) -> list[int]:
        """Token ids of a prompt as mlx-lm's tokenizer makes them."""
        self._loaded.result(_ORACLE_S)
        return self._prompts[index]

    def text(self, ids: Sequence[int]) -> str:
        """What whole ids decode to, without special tokens."""
        self._loaded.result(_ORACLE_S)
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        return str(self.tokenizer.decode(list(ids), **options))

    def plain(self, index: int) -> Reference:
        """mlx_lm's `generate_step`, greedy."""
        return self._plain[index].result(_ORACLE_S)

    def speculative(self, drafter: DrafterName, drafts: int, index: int) -> Reference:
        """mlx_lm's `speculative_generate_step` with that draft model, greedy."""
        return self._speculative[drafter, drafts, index].result(_ORACLE_S)

    def draws(self, index: int, ids: Sequence[int], sampler: Sampler) -> Reference:
        """What the sampler draws after each prefix of `ids`: one forward, filters by sorting, in float64.

        Scores are perturbed log-probabilities of the tokens that top_p keeps.
        """
        return self._compute.submit(lambda: self._draws(self.prompt(index), list(ids), sampler)).result(_ORACLE_S)

    def _queue(self, index: int, drafter: str, drafts: int, tokens: int) -> Future[Reference]:
        return self._compute.submit(lambda: self._greedy(self._prompts[index], drafter, drafts, tokens))

    def _load(self, target: Path, cut: Path) -> None:
        from mlx_lm.utils import load

        self._models["self"], self.tokenizer = load(str(target))[:2]
        self._models["cut"] = load(str(cut))[0]
        for _, text in PROMPTS:
            chat = [{"role": "user", "content": text}]
            ids = self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
            self._prompts.append([int(token_id) for token_id in ids])

    def _greedy(self, prompt: list[int], drafter: str, drafts: int, tokens: int) -> Reference:
        import mlx.core as mx
        from mlx_lm.generate import generate_step, speculative_generate_step

        model, start = self._models["self"], mx.array(prompt)
        steps: Iterable[tuple[Any, ...]] = generate_step(start, model, max_tokens=tokens)
        if drafts:
            draft_model = self._models[drafter]
            steps = speculative_generate_step(start, model, draft_model, num_draft_tokens=drafts, max_tokens=tokens)
        found = [(int(step[0]), step[1]) for step in steps]
        logprobs = np.array(mx.stack([row for _, row in found]))
        return _reference([token_id for token_id, _ in found], logprobs, logprobs)

    def _draws(self, prompt: list[int], ids: list[int], sampler: Sampler) -> Reference:
        import mlx.core as mx

        logits = self._models["self"](mx.array([prompt + ids[:-1]]))[0, len(prompt) - 1 :]
        rows = np.array(logits).astype(np.float64)
        logprobs = rows - np.logaddexp.reduce(rows, axis=-1, keepdims=True)
        noise = np.array(gumbel([step_keys(sampler.seed, step) for step in range(len(ids))], rows.shape[-1]))
        order = np.argsort(-logprobs, axis=-1, kind="stable")
        sorted_mass = np.exp(np.take_along_axis(logprobs, order, axis=-1))
        above = np.zeros_like(sorted_mass)
        np.put_along_axis(above, order, np.cumsum(sorted_mass, axis=-1) - sorted_mass, axis=-1)
        scores = np.where(above < sampler.top_p, logprobs / sampler.temperature + noise, -np.inf)
        return _reference([int(best) for best in np.argmax(scores, axis=-1)], scores, logprobs)


def _reference(ids: list[int], scores: npt.NDArray[Any], logprobs: npt.NDArray[Any]) -> Reference:
    """ids: (n,); scores, logprobs: (n, vocab)."""
    steps = np.arange(len(ids))
    others = scores.copy()
    others[steps, ids] = -np.inf
    seconds = np.argmax(others, axis=-1)
    gaps = scores[steps, ids].astype(np.float64) - scores[steps, seconds]
    return Reference(
        ids=tuple(ids),
        seconds=tuple(int(one) for one in seconds),
        gaps=tuple(float(one) for one in gaps),
        logprobs=tuple(float(one) for one in logprobs[steps, ids]),
    )


@contextmanager
def opened_oracle(target: Path, cut: Path, scale: Scale) -> Iterator[Oracle]:
    """The oracle on one BLAS thread; the process has its own number back afterwards."""
    threads = load_blas_from_env().threads
    if threads is not None:
        load_blas("auto", threads=1)
    oracle = Oracle(target, cut, scale)
    try:
        yield oracle
    finally:
        oracle.close()
        if threads is not None:
            load_blas("auto", threads=threads)
