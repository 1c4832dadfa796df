"""Drafts with a small mlx-lm model that has the target's vocabulary."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from draft_service.forwards import ForwardCounts
from draft_service.sources.base import (
    Ask,
    Computing,
    DraftEnd,
    Drafter,
    Guess,
    Prefix,
    Runner,
    SessionSpec,
    Stop,
)
from draft_service.sources.kv import KvCache, kv_bytes_for, require_rollback
from draft_service.sources.one_by_one import OneByOne
from draftwire.sampling import Draw, draw, host_ids, log_softmax, settle

if TYPE_CHECKING:
    import mlx.core as mx

    from draft_service.sources.together import Together
    from draftwire.loaded import LoadedModel

# Up to here one forward for all rows is cheaper than two, though the head is computed for each row.
ONE_FORWARD = 8


class ModelSource:
    """A loaded model. Made, used and dropped on the compute thread."""

    kind = "model"
    draws = True

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        tokenizer_size: int,
        tokenizer_fingerprint: str,
        prefill_step_size: int = 256,
        batching: Literal["auto", "off"] = "auto",
    ) -> None:
        """Warms the model up, and tries whether its sessions can share forwards.

        Raises SourceError if its cache cannot be rolled back.
        """
        self.model_id = loaded.model_id
        self.model_revision = loaded.revision or ""
        self.tokenizer_fingerprint = tokenizer_fingerprint
        self.tokenizer_size = tokenizer_size
        self.context_length = loaded.context_length
        self.weights_bytes = loaded.weights_bytes
        self.forwards = ForwardCounts()
        self._model: Any = loaded.model
        self._bytes_per_token = loaded.kv_bytes_per_token
        self._state_bytes = loaded.state_bytes
        self._step = prefill_step_size
        # A head may be padded beyond the tokenizer; those ids mean nothing to anybody.
        self._vocabulary = min(tokenizer_size, loaded.head_width)
        require_rollback(loaded.model, name=loaded.model_id)
        self.batching = _batching(loaded, batching)
        self._together: Together | None = None

    def bytes_for(self, length: int) -> int:
        """Bytes of a cache of that many tokens, recurrent states included."""
        # A forward of several sessions pads the short windows to the longest.
        padding = ONE_FORWARD if self.batching == "ragged" else 0
        return kv_bytes_for(min(length, self.context_length) + padding, self._bytes_per_token, self._state_bytes)

    def open(self, spec: SessionSpec) -> Drafter:
        """A session without KV."""
        return ModelDrafter(
            self._model,
            spec,
            vocabulary=self._vocabulary,
            context_length=self.context_length,
            prefill_step_size=self._step,
            make_kv=lambda: self._make_kv(spec),
        )

    def computing(self, runner: Runner, clock: Callable[[], float]) -> Computing:
        """All sessions in one forward a step, where the model can."""
        if self.batching != "ragged":
            return OneByOne(runner, clock, prefill_step_size=self._step)
        from draft_service.sources.benches import Benches
        from draft_service.sources.together import Together

        self._together = Together(
            Benches(self._model, self._bytes_per_token),
            runner,
            clock,
            self.forwards,
            vocabulary=self._vocabulary,
            prefill_step_size=self._step,
        )
        return self._together

    def close(self) -> None:
        """Drops the weights."""
        import mlx.core as mx

        if self._together is not None:
            self._together.close()
        self._model = self._together = None
        mx.clear_cache()

    def _make_kv(self, spec: SessionSpec) -> KvCache:
        if self.batching != "ragged":
            return KvCache(self._model, self.forwards)
        from draft_service.sources.benches import PooledKv

        return PooledKv(self._model, self.forwards, charged_bytes=self.bytes_for(spec.max_length))


class ModelPrefix:
    """The KV of a session that is over."""

    def __init__(self, kv: KvCache) -> None:
        """kv: in arrays of its own, with committed ids only."""
        self.ids = array("I", kv.fed)
        self.nbytes = kv.nbytes
        self.kv: KvCache | None = kv

    def reach(self, length: int) -> int:
        """How many of the first `length` ids, at most, a session can take over."""
        return self.kv.reach(length) if self.kv is not None else 0

    def drop(self) -> None:
        """Frees the KV."""
        if self.kv is not None:
            self.kv.drop()
        self.kv = None


class ModelDrafter:
    """One session: the committed ids it was told, and the KV of a path that agrees with them as far as possible.

    The KV holds [0, agreed) of the committed ids, then ids that were guessed: its own drafts and assumed ones. Where the
    text takes another way, they are cut off; where it follows them, they are paid for already.
    """

    def __init__(
        self,
        model: Any,
        spec: SessionSpec,
        *,
        vocabulary: int,
        context_length: int,
        prefill_step_size: int,
        make_kv: Callable[[], KvCache] | None = None,
    ) -> None:
        """make_kv: gives an empty cache; one of its own for each session if absent."""
        self._make_kv = make_kv or (lambda: KvCache(model))
        self.spec = spec
        self._vocabulary = vocabulary
        self._context_length = context_length
        self._step = prefill_step_size
        self._committed: list[int] = []
        self._agreed = 0
        self._kv: KvCache | None = None

    @property
    def length(self) -> int:
        """Committed ids that it was told."""
        return len(self._committed)

    @property
    def behind(self) -> int:
        """Committed ids without KV; the last one is fed by `draft`, which needs its logits."""
        return max(0, min(len(self._committed) - 1, self._context_length) - self._agree())

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV cache now."""
        return 0 if self._kv is None else self._kv.nbytes

    def advance(self, ids: Sequence[int]) -> None:
        """Notes committed ids."""
        self._committed.extend(ids)

    def rewrite(self, ids: Sequence[int]) -> int:
        """Keeps the KV of the prefix that both have."""
        self._committed = list(ids)
        self._agreed = 0
        return self._agree()

    def feed(self, stop: Stop) -> None:
        """Computes the KV of up to `prefill_step_size` committed ids."""
        kv = self.opened()
        chunk = min(self.behind, self._step)
        if chunk and not stop():
            start = self._agree()
            kv.cut(start)
            # A cache with recurrent state may have gone back further.
            kv.extend(self._committed[len(kv.fed) : start + chunk])

    def draft(self, ask: Ask, stop: Stop) -> Guess:
        """One forward a draft. The noise of the id at position p has step p - prompt_length."""
        limit, end = self.limit_of(ask)
        row = self._row_behind(ask.assumed, stop) if limit > 0 else None
        if row is None:
            return Guess(end=end if limit <= 0 else DraftEnd.TIME_BUDGET)
        return self._continue(row, replace(ask, limit=limit), end, stop)

    def limit_of(self, ask: Ask) -> tuple[int, DraftEnd]:
        """How many ids the context leaves room for, up to what is asked, and why it ends there."""
        room = self._context_length - len(self._committed) - len(ask.assumed)
        return min(ask.limit, room), DraftEnd.CONTEXT_FULL if room < ask.limit else DraftEnd.MAX_DRAFT_TOKENS

    def goal(self) -> list[int]:
        """The committed ids that should have KV before a draft is asked for."""
        return self._committed[: max(0, min(len(self._committed) - 1, self._context_length))]

    def path(self, assumed: Sequence[int]) -> list[int]:
        """Cuts the KV back to what it shares with committed + assumed ids, which it returns; the last is never fed."""
        path = [*self._committed, *assumed]
        kv, keep = self.opened(), self._agree()
        if keep == len(self._committed):
            keep = _common(kv.fed, path, keep)
        # The logits of the last id are needed, so it is fed (again) in any case.
        kv.cut(min(keep, len(path) - 1))
        return path

    def keep(self) -> Prefix | None:
        """Hands over the KV of committed ids."""
        kv = self._kv
        if kv is None:
            return None
        kv.refresh()
        kv.cut(self._agree())
        if not kv.fed:
            return None
        kv.settle()
        self._kv, self._agreed = None, 0
        return ModelPrefix(kv)

    def adopt(self, prefix: Prefix, length: int) -> None:
        """Takes a copy of the first `length` ids' KV."""
        if isinstance(prefix, ModelPrefix) and prefix.kv is not None:
            self.opened().adopt(prefix.kv, length)

    def close(self) -> None:
        """Drops the KV and gives its memory back."""
        import mlx.core as mx

        if self._kv is not None:
            self._kv.drop()
        self._kv, self._committed, self._agreed = None, [], 0
        mx.clear_cache()

    def _continue(self, row: mx.array, ask: Ask, end: DraftEnd, stop: Stop) -> Guess:
        """Drafts from the logits `row` on; `end` is why the limit is where it is."""
        import mlx.core as mx

        ids: list[int] = []
        chances: list[float] = []
        kv, sampler = self.opened(), self.spec.sampler
        step = len(self._committed) + len(ask.assumed) - self.spec.prompt_length
        while True:
            drawn = draw(row, sampler, [step + len(ids)])
            last = len(ids) + 1 == ask.limit
            ahead: mx.array | None = None
            if not last and not isinstance(drawn, Draw):
                # The next forward is built while this one still runs.
                self._mark(kv)
                ahead = kv.logits_lazily(drawn)[:, : self._vocabulary]
                mx.async_eval(ahead)  # type: ignore[no-untyped-call]
            token_id = settle(drawn, sampler)[0] if isinstance(drawn, Draw) else host_ids(drawn)[0]
            ids.append(token_id)
            if ask.want_confidences:
                chances.append((chances[-1] if chances else 1.0) * chance_of(row, token_id))
            if ahead is not None:
                kv.fed.append(token_id)
                kv.check()
            if token_id in self.spec.end_ids:
                end = DraftEnd.END_TOKEN
                break
            if last:
                break
            if stop():
                end = DraftEnd.TIME_BUDGET
                break
            if ahead is None:
                self._mark(kv)
            row = ahead if ahead is not None else kv.logits([token_id])[:, : self._vocabulary]
        return Guess(ids=tuple(ids), confidences=tuple(min(1.0, chance) for chance in chances), end=end)

    def _row_behind(self, assumed: Sequence[int], stop: Stop) -> mx.array | None:
        """Logits (1, vocabulary) of what follows committed + assumed, or None when stopped before."""
        path, kv = self.path(assumed), self.opened()
        while len(path) - len(kv.fed) > ONE_FORWARD:
            if stop():
                return None
            start = len(kv.fed)
            kv.extend(path[start : min(start + self._step, len(path) - 1)])
        if stop():
            return None
        self._mark(kv)
        return kv.logits(path[len(kv.fed) :])[:, : self._vocabulary]

    def _mark(self, kv: KvCache) -> None:
        # The last committed id may be fed again: a second draft from the same place needs its logits.
        kv.mark(min(self._agree(), len(self._committed) - 1))

    def _agree(self) -> int:
        """How many ids from the start the KV and the committed ids share."""
        if self._kv is not None:
            self._agreed = _common(self._kv.fed, self._committed, self._agreed)
        return self._agreed

    def opened(self) -> KvCache:
        """The KV, made if need be; `fed` says what it holds."""
        if self._kv is None:
            self._kv = self._make_kv()
        self._kv.refresh()
        return self._kv


def load_model_source(
    name: str,
    *,
    dtype: Literal["auto", "float32", "as-stored"],
    cache_dir: Path | None,
    context_length: int | None,
    prefill_step_size: int,
    batching: Literal["auto", "off"] = "auto",
) -> ModelSource:
    """Loads a bundled name, a directory or a Hugging Face id; on the compute thread.

    Raises ModelError if it cannot be loaded, SourceError if it cannot draft.
    """
    from draftwire.lm import load_model
    from draftwire.tokenizer import Tokenizer, TokenizerError

    loaded = load_model(name, dtype=dtype, cache_dir=cache_dir, context_length=context_length)
    if loaded.path is None:
        raise TokenizerError(f"{name} has no directory with a tokenizer")
    tokenizer = Tokenizer(loaded.path)
    return ModelSource(
        loaded,
        tokenizer_size=tokenizer.size,
        tokenizer_fingerprint=tokenizer.fingerprint,
        prefill_step_size=prefill_step_size,
        batching=batching,
    )


def _batching(loaded: LoadedModel, wanted: Literal["auto", "off"]) -> str:
    if wanted == "off":
        return "one by one: switched off"
    from draftwire.ragged_probe import why_not

    reason = why_not(loaded)
    return f"one by one: {reason}" if reason else "ragged"


def chance_of(row: mx.array, token_id: int) -> float:
    """The probability of an id. row: logits (1, vocabulary)."""
    return math.exp(cast("float", log_softmax(row)[0, token_id].item()))


def _common(left: Sequence[int], right: Sequence[int], start: int) -> int:
    """Length of the common prefix, of which the first `start` ids are known to agree."""
    shorter = min(len(left), len(right))
    start = min(start, shorter)
    while start < shorter and left[start] == right[start]:
        start += 1
    return start
