"""Drafts with a small mlx-lm model that has the target's vocabulary."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from draft_service.sources.base import Ask, DraftEnd, Drafter, Guess, SessionSpec, Stop
from draft_service.sources.kv import KvCache, kv_bytes_for, require_rollback
from draftwire.sampling import Draw, draw, host_ids, log_softmax, settle

if TYPE_CHECKING:
    import mlx.core as mx

    from draftwire.loaded import LoadedModel

# Up to here one forward for all rows is cheaper than two, though the head is computed for each row.
_ONE_FORWARD = 8


class ModelSource:
    """A loaded model. Made, used and dropped on the compute thread."""

    kind = "model"
    draws = True

    def __init__(
        self, loaded: LoadedModel, *, tokenizer_size: int, tokenizer_fingerprint: str, prefill_step_size: int = 256
    ) -> None:
        """Warms the model up. Raises SourceError if its cache cannot be rolled back."""
        self.model_id = loaded.model_id
        self.model_revision = loaded.revision or ""
        self.tokenizer_fingerprint = tokenizer_fingerprint
        self.tokenizer_size = tokenizer_size
        self.context_length = loaded.context_length
        self.weights_bytes = loaded.weights_bytes
        self._model: Any = loaded.model
        self._bytes_per_token = loaded.kv_bytes_per_token
        self._state_bytes = loaded.state_bytes
        self._step = prefill_step_size
        # A head may be padded beyond the tokenizer; those ids mean nothing to anybody.
        self._vocabulary = min(tokenizer_size, loaded.head_width)
        require_rollback(loaded.model, name=loaded.model_id)

    def bytes_for(self, length: int) -> int:
        """Bytes of a cache of that many tokens, recurrent states included."""
        return kv_bytes_for(min(length, self.context_length), self._bytes_per_token, self._state_bytes)

    def open(self, spec: SessionSpec) -> Drafter:
        """A session without KV."""
        return ModelDrafter(
            self._model,
            spec,
            vocabulary=self._vocabulary,
            context_length=self.context_length,
            prefill_step_size=self._step,
        )

    def close(self) -> None:
        """Drops the weights."""
        import mlx.core as mx

        self._model = None
        mx.clear_cache()


class ModelDrafter:
    """One session: the committed ids it was told, and the KV of a path that agrees with them as far as possible.

    The KV holds [0, agreed) of the committed ids, then ids that were guessed: its own drafts and assumed ones. Where the
    text takes another way, they are cut off; where it follows them, they are paid for already.
    """

    def __init__(
        self, model: Any, spec: SessionSpec, *, vocabulary: int, context_length: int, prefill_step_size: int
    ) -> None:
        self._model = model
        self._spec = spec
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
        chunk = min(self.behind, self._step)
        if chunk and not stop():
            kv, start = self._opened(), self._agree()
            kv.cut(start)
            # A cache with recurrent state may have gone back further.
            kv.extend(self._committed[len(kv.fed) : start + chunk])

    def draft(self, ask: Ask, stop: Stop) -> Guess:
        """One forward a draft. The noise of the id at position p has step p - prompt_length."""
        position = len(self._committed) + len(ask.assumed)
        room = self._context_length - position
        limit, end = min(ask.limit, room), DraftEnd.MAX_DRAFT_TOKENS
        if room < ask.limit:
            end = DraftEnd.CONTEXT_FULL
        row = self._row_behind(ask.assumed, stop) if limit > 0 else None
        if row is None:
            return Guess(end=end if limit <= 0 else DraftEnd.TIME_BUDGET)
        return self._continue(row, replace(ask, limit=limit), end, stop)

    def close(self) -> None:
        """Drops the KV and gives its memory back."""
        import mlx.core as mx

        self._model, self._kv, self._committed, self._agreed = None, None, [], 0
        mx.clear_cache()

    def _continue(self, row: mx.array, ask: Ask, end: DraftEnd, stop: Stop) -> Guess:
        """Drafts from the logits `row` on; `end` is why the limit is where it is."""
        import mlx.core as mx

        ids: list[int] = []
        chances: list[float] = []
        kv, sampler = self._opened(), self._spec.sampler
        step = len(self._committed) + len(ask.assumed) - self._spec.prompt_length
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
                chances.append((chances[-1] if chances else 1.0) * _chance(row, token_id))
            if ahead is not None:
                kv.fed.append(token_id)
                kv.check()
            if token_id in self._spec.end_ids:
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
        path = [*self._committed, *assumed]
        kv, keep = self._opened(), self._agree()
        if keep == len(self._committed):
            keep = _common(kv.fed, path, keep)
        # The logits of the last id are needed, so it is fed (again) in any case.
        kv.cut(min(keep, len(path) - 1))
        while len(path) - len(kv.fed) > _ONE_FORWARD:
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

    def _opened(self) -> KvCache:
        if self._kv is None:
            self._kv = KvCache(self._model)
        return self._kv


def load_model_source(
    name: str,
    *,
    dtype: Literal["auto", "float32", "as-stored"],
    cache_dir: Path | None,
    context_length: int | None,
    prefill_step_size: int,
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
    )


def _chance(row: mx.array, token_id: int) -> float:
    return math.exp(cast("float", log_softmax(row)[0, token_id].item()))


def _common(left: Sequence[int], right: Sequence[int], start: int) -> int:
    """Length of the common prefix, of which the first `start` ids are known to agree."""
    shorter = min(len(left), len(right))
    start = min(start, shorter)
    while start < shorter and left[start] == right[start]:
        start += 1
    return start
