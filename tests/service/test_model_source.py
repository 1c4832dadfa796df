"""The model source: its drafts are what the model itself would write, whatever was accepted, rolled back or stopped."""

from __future__ import annotations

import asyncio
import itertools
import signal
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from conftest_draft import (
    NAME,
    Running,
    advance,
    connected,
    draft_request,
    draft_service,
    prefill_messages,
    program,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from draft_service.sources.base import Ask, DraftEnd, Guess, SessionSpec, SourceError
from draft_service.sources.kv import KvCache
from draft_service.sources.model import ModelDrafter, ModelSource, load_model_source
from draftwire.compute import ComputeThread
from draftwire.errors import InvalidRequest
from draftwire.loaded import LoadedModel
from draftwire.sampling import Sampler, draw_ids
from draftwire.testing_models import TINY_VOCAB, TinyKind, make_tiny_model, save_tiny_model
from draftwire.v1 import common_pb2, draft_pb2
from draftwire.wire import from_rpc_error

PROMPT = [72, 101, 108, 108, 111, 44, 32]
GREEDY = Sampler()
DRAWN = Sampler(temperature=0.8, seed=0xABCDEF0123456789)
FILTERED = Sampler(temperature=0.8, top_p=0.9, top_k=20, min_p=0.01, seed=7)
SAMPLERS = {"greedy": GREEDY, "drawn": DRAWN, "filtered": FILTERED}


def never() -> bool:
    return False


class Plain:
    """Writes with a model token by token, without any cache."""

    def __init__(self, loaded: LoadedModel, sampler: Sampler, vocabulary: int = TINY_VOCAB) -> None:
        self.loaded = loaded
        self.sampler = sampler
        self.vocabulary = vocabulary
        self._known: dict[tuple[int, ...], int] = {}

    def __call__(self, path: Sequence[int], count: int) -> list[int]:
        import mlx.core as mx

        text = list(path)
        for _ in range(count):
            key = tuple(text)
            if key not in self._known:
                row = self.loaded.model(mx.array([text]))[:, -1, : self.vocabulary]
                self._known[key] = draw_ids(row, self.sampler, [len(text) - len(PROMPT)])[0]
            text.append(self._known[key])
        return text[len(path) :]


class Counting:
    """A model that counts the rows of each of its forwards."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.layers = model.layers
        if hasattr(model, "make_cache"):
            self.make_cache = model.make_cache
        self.rows: list[int] = []

    def __call__(self, ids: Any, cache: Any = None) -> Any:
        self.rows.append(ids.shape[1])
        return self.model(ids, cache=cache)


def spec(sampler: Sampler = GREEDY, *end_ids: int) -> SessionSpec:
    return SessionSpec(prompt_length=len(PROMPT), max_length=500, sampler=sampler, end_ids=frozenset(end_ids))


def opened(
    loaded: LoadedModel, session: SessionSpec, *, step: int = 256, model: Any = None, context_length: int = 512
) -> ModelDrafter:
    return ModelDrafter(
        model or loaded.model, session, vocabulary=TINY_VOCAB, context_length=context_length, prefill_step_size=step
    )


def draft(
    drafter: ModelDrafter, limit: int = 6, assumed: Sequence[int] = (), stop: Callable[[], bool] = never
) -> Guess:
    return drafter.draft(Ask(assumed=tuple(assumed), limit=limit), stop)


def assert_true_kv(drafter: ModelDrafter, loaded: LoadedModel, text: Sequence[int]) -> None:
    """The cache is what a fresh prefill of its ids gives, and its ids begin with the text."""
    import mlx.core as mx

    kv = drafter._kv
    assert kv is not None
    common = min(len(kv.fed), len(text))
    assert kv.fed[:common] == list(text[:common])
    if not kv.fed:
        # Recurrent state that had no mark before the place where the text changed.
        return
    fresh = KvCache(loaded.model)
    fresh.extend(kv.fed)
    for own, expected in zip(_rows(kv), _rows(fresh), strict=True):
        assert mx.allclose(own, expected, rtol=1e-4, atol=1e-4).item()


def _rows(kv: KvCache) -> list[Any]:
    """The arrays, cut to what the next forward can see of them."""
    from mlx_lm.models.cache import ArraysCache

    from draftwire.caches import flat

    rows: list[Any] = []
    for leaf in flat(kv._cache.layers):
        if isinstance(leaf, ArraysCache):
            rows += leaf.cache
        else:
            seen = min(leaf.offset, getattr(leaf, "max_size", leaf.offset + 1) - 1)
            rows += [array[..., array.shape[2] - seen :, :] for array in leaf.keys_and_values()]
    return rows


@pytest.fixture(scope="module")
def llama() -> LoadedModel:
    return make_tiny_model("llama", seed=1)


@pytest.mark.parametrize("step", [1, 3, 256])
@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "phi3", "gemma3", "llama4", "qwen3_5", "recurrent_gemma"])
def test_a_draft_is_what_the_model_itself_writes(kind: TinyKind, sampler: Sampler, step: int) -> None:
    loaded = make_tiny_model(kind, seed=2)
    plain = Plain(loaded, sampler)
    drafter = opened(loaded, spec(sampler), step=step)
    drafter.advance(PROMPT)
    assert list(draft(drafter, 12).ids) == plain(PROMPT, 12)
    assert list(draft(drafter, 4, [9, 8]).ids) == plain([*PROMPT, 9, 8], 4)


def test_noise_belongs_to_the_position_so_another_seed_writes_another_text(llama: LoadedModel) -> None:
    drafts = set()
    for seed in range(4):
        drafter = opened(llama, spec(Sampler(temperature=0.8, seed=seed)))
        drafter.advance(PROMPT)
        drafts.add(draft(drafter, 12).ids)
    assert len(drafts) == 4


operations = st.lists(
    st.one_of(
        st.tuples(st.just("accept"), st.integers(0, 8), st.integers(0, 255)),
        st.tuples(st.just("assume"), st.integers(0, 6), st.integers(0, 255)),
        st.tuples(st.just("stop"), st.integers(0, 5), st.just(0)),
        st.tuples(st.just("commit"), st.integers(1, 20), st.integers(0, 255)),
        st.tuples(st.just("rewrite"), st.integers(1, 40), st.integers(0, 255)),
        st.tuples(st.just("feed"), st.just(0), st.just(0)),
    ),
    max_size=8,
)


@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=operations)
def test_any_pattern_of_acceptances_and_roll_backs_leaves_drafts_exact(
    llama: LoadedModel, sampler: Sampler, steps: list[tuple[str, int, int]]
) -> None:
    follow(llama, sampler, steps)


@pytest.fixture(scope="module", params=["gemma3", "lfm2", "qwen3_5", "recurrent_gemma"])
def unusual(request: pytest.FixtureRequest) -> LoadedModel:
    """Sliding windows of 8 tokens, recurrent state, and both."""
    return make_tiny_model(request.param, seed=1, sliding_window=8)


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=operations)
def test_windows_and_recurrent_state_leave_drafts_exact_too(
    unusual: LoadedModel, steps: list[tuple[str, int, int]]
) -> None:
    follow(unusual, DRAWN, steps)


def follow(loaded: LoadedModel, sampler: Sampler, steps: list[tuple[str, int, int]]) -> None:
    """Does the steps, and after each compares drafts and cache with what they should be."""
    plain = Plain(loaded, sampler)
    drafter = opened(loaded, spec(sampler), step=4)
    drafter.advance(PROMPT)
    text = list(PROMPT)
    for kind, count, token_id in steps:
        guess = draft(drafter, 5)
        assert list(guess.ids) == plain(text, 5)
        new: list[int] = []
        if kind == "accept":
            new = [*guess.ids[:count], token_id]
        elif kind == "assume":
            assumed = [*guess.ids[:count], token_id]
            assert list(draft(drafter, 3, assumed).ids) == plain([*text, *assumed], 3)
        elif kind == "stop":
            answers = itertools.chain([False] * count, itertools.repeat(True))
            stopped = draft(drafter, 5, stop=lambda: next(answers))  # noqa: B023 -- used within this turn of the loop
            assert list(stopped.ids) == plain(text, 5)[: len(stopped.ids)]
            new = list(stopped.ids[:1])
        elif kind == "commit":
            new = [(token_id + i) % 256 for i in range(count)]
        elif kind == "rewrite":
            text = [*text[:count], token_id]
            text += PROMPT[len(text) :]
            drafter.rewrite(text)
        else:
            while drafter.behind:
                drafter.feed(never)
        drafter.advance(new)
        text += new
        assert_true_kv(drafter, loaded, text[: drafter._agree()])
    assert list(draft(drafter, 5).ids) == plain(text, 5)


def test_accepted_drafts_cost_no_computation(llama: LoadedModel) -> None:
    counting = Counting(llama.model)
    drafter = opened(llama, spec(), model=counting)
    drafter.advance(PROMPT)
    first = draft(drafter, 5)
    assert counting.rows == [len(PROMPT), 1, 1, 1, 1]
    counting.rows.clear()
    drafter.advance([*first.ids, 7])
    draft(drafter, 3)
    # The last draft and the bonus were never fed, the four drafts before them were.
    assert counting.rows == [2, 1, 1]
    counting.rows.clear()
    guess = draft(drafter, 3)
    assert counting.rows == [1, 1, 1]
    counting.rows.clear()
    drafter.advance([guess.ids[0], (guess.ids[1] + 1) % 256])
    draft(drafter, 1)
    assert counting.rows == [1]


def test_a_look_ahead_on_its_own_drafts_costs_one_row(llama: LoadedModel) -> None:
    counting = Counting(llama.model)
    drafter = opened(llama, spec(), model=counting)
    drafter.advance(PROMPT)
    first = draft(drafter, 5)
    counting.rows.clear()
    ahead = draft(drafter, 2, first.ids)
    assert counting.rows == [1, 1]
    assert [*first.ids, *ahead.ids] == Plain(llama, GREEDY)(PROMPT, 7)


def test_a_draft_stopped_after_its_roll_back_leaves_the_cache_true(llama: LoadedModel) -> None:
    drafter = opened(llama, spec(), step=4)
    drafter.advance(PROMPT)
    text = [*PROMPT, *draft(drafter, 5).ids[:2]]
    drafter.advance(text[len(PROMPT) :])
    assert not draft(drafter, stop=lambda: True).ids
    drafter.advance(range(20, 30))
    while drafter.behind:
        drafter.feed(never)
    text += range(20, 30)
    assert_true_kv(drafter, llama, text)
    assert list(draft(drafter, 5).ids) == Plain(llama, GREEDY)(text, 5)
    assert_true_kv(drafter, llama, text)


def test_a_long_catch_up_is_fed_in_chunks_whose_logits_are_never_computed(llama: LoadedModel) -> None:
    counting = Counting(llama.model)
    drafter = opened(llama, spec(), step=16, model=counting)
    drafter.advance(list(range(50)))
    while drafter.behind:
        drafter.feed(never)
    assert counting.rows == [16, 16, 16, 1]
    assert list(draft(drafter, 2).ids) == Plain(llama, GREEDY)(list(range(50)), 2)


def test_a_rewrite_keeps_the_kv_of_the_common_prefix(llama: LoadedModel) -> None:
    drafter = opened(llama, spec())
    drafter.advance(list(range(30)))
    draft(drafter, 1)
    assert drafter.rewrite([*range(20), 200, 201]) == 20
    assert (drafter.length, drafter.behind) == (22, 1)


def test_a_draft_ends_after_an_end_token(llama: LoadedModel) -> None:
    written = Plain(llama, GREEDY)(PROMPT, 8)
    end_id = written[3]
    drafter = opened(llama, spec(GREEDY, end_id))
    drafter.advance(PROMPT)
    guess = draft(drafter, 8)
    assert (list(guess.ids), guess.end) == (written[: written.index(end_id) + 1], DraftEnd.END_TOKEN)
    drafter.advance(guess.ids)
    assert list(draft(drafter, 2).ids) == Plain(llama, GREEDY)([*PROMPT, *guess.ids], 2)


@pytest.mark.parametrize("length", [7, 10, 11, 12, 13, 20])
def test_a_draft_ends_where_its_context_is_full(llama: LoadedModel, length: int) -> None:
    text = [*PROMPT, *range(13)][:length]
    counting = Counting(llama.model)
    drafter = opened(llama, spec(), model=counting, context_length=12)
    drafter.advance(text)
    while drafter.behind:
        drafter.feed(never)
    guess = draft(drafter, 4)
    room = max(0, 12 - length)
    assert len(guess.ids) == min(4, room)
    assert guess.end is (DraftEnd.MAX_DRAFT_TOKENS if room >= 4 else DraftEnd.CONTEXT_FULL)
    assert sum(counting.rows) <= 12


@pytest.mark.parametrize("asked", [0, 1, 3])
def test_a_draft_that_is_stopped_returns_what_it_has(llama: LoadedModel, asked: int) -> None:
    drafter = opened(llama, spec())
    drafter.advance(PROMPT)
    answers = itertools.chain([False] * asked, itertools.repeat(True))
    guess = draft(drafter, 8, stop=lambda: next(answers))
    assert (list(guess.ids), guess.end) == (Plain(llama, GREEDY)(PROMPT, 8)[:asked], DraftEnd.TIME_BUDGET)


@pytest.mark.parametrize("top_k", [0, 1000], ids=["all", "filtered"])
def test_no_draft_lies_outside_the_tokenizer(top_k: int) -> None:
    """A padded head and a hot sampler: three of four ids would be padding."""
    padded = make_tiny_model("llama", seed=1, vocab_size=1024)
    hot = Sampler(temperature=100.0, seed=3, top_k=top_k)
    source = ModelSource(padded, tokenizer_size=TINY_VOCAB, tokenizer_fingerprint="f")
    drafter = source.open(spec(hot))
    drafter.advance(PROMPT)
    ids = drafter.draft(Ask(limit=64), never).ids
    assert max(ids) < TINY_VOCAB
    assert max(Plain(padded, hot, vocabulary=1024)(PROMPT, 16)) >= TINY_VOCAB


def test_a_confidence_is_the_chance_of_all_drafts_so_far(llama: LoadedModel) -> None:
    import mlx.core as mx

    drafter = opened(llama, spec(DRAWN))
    drafter.advance(PROMPT)
    guess = drafter.draft(Ask(limit=4, want_confidences=True), never)
    text, chance, expected = list(PROMPT), 1.0, []
    for token_id in guess.ids:
        row = mx.softmax(llama.model(mx.array([text]))[0, -1, :TINY_VOCAB])
        chance *= cast("float", row[token_id].item())
        expected.append(chance)
        text.append(token_id)
    assert guess.confidences == pytest.approx(expected, rel=1e-3)


def test_what_is_charged_covers_the_kv(llama: LoadedModel) -> None:
    source = ModelSource(llama, tokenizer_size=TINY_VOCAB, tokenizer_fingerprint="f", prefill_step_size=100)
    for length in (7, 255, 256, 257, 301, 511):
        drafter = source.open(spec())
        drafter.advance([i % 250 for i in range(length)])
        while drafter.behind:
            drafter.feed(never)
        drafter.draft(Ask(limit=1), never)
        assert 0 < drafter.kv_bytes <= source.bytes_for(length)
        drafter.close()
        assert drafter.kv_bytes == 0


def test_a_cache_of_an_unknown_kind_is_refused_at_load() -> None:
    from mlx_lm.models.cache import KVCache

    class OddCache(KVCache):  # type: ignore[misc]
        pass

    loaded = make_tiny_model("llama", seed=1)
    loaded.model.make_cache = lambda: [OddCache(), OddCache()]
    with pytest.raises(SourceError, match=r"tiny-llama-1 cannot draft: its cache \(OddCache\).*choose another"):
        ModelSource(loaded, tokenizer_size=TINY_VOCAB, tokenizer_fingerprint="f")


@pytest.mark.parametrize("kind", ["gemma3", "falcon_h1"])
def test_a_rejected_draft_costs_no_new_prefill(kind: TinyKind) -> None:
    """Windows and recurrent state: what is fed again is a few rows, however long the text is."""
    loaded = make_tiny_model(kind, seed=1, sliding_window=8)
    counting = Counting(loaded.model)
    drafter = opened(loaded, spec(), model=counting)
    drafter.advance([*PROMPT, *range(100)])
    for accepted in (0, 1, 3, 5):
        guess = draft(drafter, 6)
        drafter.advance([*guess.ids[:accepted], (guess.ids[accepted] + 1) % 256])
        counting.rows.clear()
        draft(drafter, 1)
        assert sum(counting.rows) <= 1 + (accepted + 2 if kind == "falcon_h1" else 0)


def test_a_cache_that_silently_ignores_a_trim_is_refused_at_load(
    llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlx_lm.models.cache import KVCache

    monkeypatch.setattr(KVCache, "trim", lambda self, count: 0)
    with pytest.raises(SourceError, match="cannot be rolled back"):
        ModelSource(llama, tokenizer_size=TINY_VOCAB, tokenizer_fingerprint="f")


# --- over the wire ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny", "llama", 1)


@pytest.fixture
async def compute() -> AsyncIterator[ComputeThread]:
    thread = ComputeThread()
    yield thread
    await asyncio.to_thread(thread.close)


@pytest.fixture
async def served(model_dir: Path, compute: ComputeThread) -> AsyncIterator[Running]:
    def load() -> ModelSource:
        return load_model_source(
            str(model_dir), dtype="auto", cache_dir=None, context_length=None, prefill_step_size=32
        )

    source = await compute.run(load)
    async with draft_service(source, compute) as running:
        yield running
    await compute.run(source.close)


def sampling(sampler: Sampler, **fields: Any) -> common_pb2.NoiseSampling:
    return common_pb2.NoiseSampling(
        **{
            "temperature": sampler.temperature,
            "top_p": sampler.top_p,
            "top_k": sampler.top_k,
            "min_p": sampler.min_p,
            "seed": sampler.seed,
            "noise_version": 1,
            "sampler_version": 1,
            **fields,
        }
    )


async def generated(running: Running, name: str, fields: dict[str, Any], rounds: int = 4) -> list[int]:
    """Writes by accepting every draft."""
    await running.stub.Prefill(
        iter(prefill_messages(PROMPT, session_id=name, prompt_length=len(PROMPT), max_length=200, **fields))
    )
    text, sent = list(PROMPT), len(PROMPT)
    for number in range(rounds):
        reply = await running.stub.Draft(draft_request(text, sent, number, session_id=name, max_draft_tokens=5))
        assert (reply.first_position, reply.end) == (len(text), draft_pb2.DRAFT_END_MAX_DRAFT_TOKENS)
        sent = len(text)
        text += reply.token_ids
    return text[len(PROMPT) :]


async def test_describe_names_model_vocabulary_and_noise(served: Running) -> None:
    reply = await served.stub.Describe(draft_pb2.DescribeRequest())
    assert (reply.source_kind, reply.model_id, reply.tokenizer_size) == ("model", "tiny", TINY_VOCAB)
    assert len(reply.tokenizer_fingerprint) == 64
    assert (list(reply.noise_versions), list(reply.sampler_versions)) == ([1], [1])
    assert (reply.context_length, reply.weights_bytes > 100_000) == (512, True)


async def test_sessions_that_draft_side_by_side_do_not_touch_each_other(served: Running, llama: LoadedModel) -> None:
    texts = await asyncio.gather(
        *(generated(served, f"session-{name}-00000000", {"sampling": sampling(s)}) for name, s in SAMPLERS.items())
    )
    assert texts == [Plain(llama, sampler)(PROMPT, 20) for sampler in SAMPLERS.values()]


@pytest.mark.parametrize("fields", [{"noise_version": 2}, {"sampler_version": 9}, {"noise_version": 0}])
async def test_an_unknown_way_of_drawing_is_drafted_greedily(
    served: Running, llama: LoadedModel, fields: dict[str, int]
) -> None:
    text = await generated(served, NAME, {"sampling": sampling(DRAWN, **fields)}, rounds=1)
    assert text == Plain(llama, GREEDY)(PROMPT, 5)


async def test_ids_outside_the_vocabulary_are_refused_before_the_model_sees_them(served: Running) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.stub.Prefill(iter(prefill_messages([1, TINY_VOCAB])))
    error = from_rpc_error(caught.value)
    assert (type(error), error.reason) == (InvalidRequest, "TOKEN_OUT_OF_VOCAB")


async def test_a_prefill_says_what_it_reused_and_where_the_time_went(served: Running) -> None:
    text = [i % 200 for i in range(100)]
    first = await served.stub.Prefill(iter(prefill_messages(text)))
    assert first.reused_length == 0
    assert first.timings.computed.nanos > 0
    second = await served.stub.Prefill(iter(prefill_messages([*text[:80], 7, 7])))
    assert second.reused_length == 80
    third = await served.stub.Draft(draft_request([*text[:80], 7, 7], 82))
    assert (third.committed_length, third.timings.computed.nanos > 0) == (82, True)


async def test_a_higher_round_ends_a_long_catch_up_between_chunks(served: Running, compute: ComputeThread) -> None:
    text = [i % 200 for i in range(400)]
    await served.stub.Prefill(iter(prefill_messages(text[:1])))
    session = served.rounds.table.find("insecure", NAME)
    gate = threading.Event()
    compute.submit(gate.wait)
    older = asyncio.ensure_future(served.stub.Draft(draft_request(text, 1, 1)))
    while len(session.history) < 400:
        await served.stub.Describe(draft_pb2.DescribeRequest())
    newer = asyncio.ensure_future(served.stub.Draft(draft_request([*text, 3], 400, 2)))
    while len(session.history) < 401:
        await served.stub.Describe(draft_pb2.DescribeRequest())
    gate.set()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await older
    assert caught.value.code() is grpc.StatusCode.ABORTED
    reply = await newer
    assert (reply.committed_length, len(reply.token_ids)) == (401, 4)


async def test_a_time_budget_that_is_over_gives_an_empty_draft_and_keeps_the_ids(served: Running) -> None:
    await served.stub.Prefill(iter(prefill_messages(PROMPT)))
    request = draft_request([*PROMPT, 5], len(PROMPT))
    request.time_budget.SetInParent()
    reply = await served.stub.Draft(request)
    assert (reply.committed_length, list(reply.token_ids)) == (len(PROMPT) + 1, [])
    assert reply.end == draft_pb2.DRAFT_END_TIME_BUDGET


async def test_commit_needs_no_computing_and_release_frees_the_kv(served: Running) -> None:
    await served.stub.Prefill(iter(prefill_messages(PROMPT)))
    commit = draft_pb2.CommitRequest(session_id=NAME, round=1, advance=advance([*PROMPT, 1, 2], len(PROMPT)))
    assert (await served.stub.Commit(commit)).committed_length == len(PROMPT) + 2
    await served.stub.Release(draft_pb2.ReleaseRequest(session_ids=[NAME]))
    await served.rounds.idle()
    load = (await served.stub.Describe(draft_pb2.DescribeRequest())).load
    assert (load.sessions, load.kv_bytes, load.queue_depth) == (0, 0, 0)


# --- the program -----------------------------------------------------------------------------------------------------


async def busy(address: str, name: str) -> grpc.StatusCode:
    """Asks for drafts until the service is gone; what it then said."""
    text = [i % 200 for i in range(300)]
    async with connected(address) as stub:
        try:
            await stub.Prefill(iter(prefill_messages(text, session_id=name, max_length=500)))
            for number in itertools.count(1):
                await stub.Draft(draft_request(text, 300, number, session_id=name, max_draft_tokens=16))
        except grpc.aio.AioRpcError as error:
            return error.code()
    raise AssertionError("unreachable")


@pytest.mark.parametrize("cycle", range(2))
async def test_sigterm_ends_an_idle_model_drafter_with_0(model_dir: Path, cycle: int) -> None:
    async with program("--draft-model", str(model_dir)) as running:
        await running.until("state", state="serving")
        running.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(running.end(), 60) == 0, running.lines


@pytest.mark.parametrize("cycle", range(2))
async def test_sigterm_mid_call_ends_a_model_drafter_with_0(model_dir: Path, cycle: int) -> None:
    async with program("--draft-model", str(model_dir), "--drain-s", "0.2") as running:
        await running.until("state", state="serving")
        callers = [asyncio.ensure_future(busy(running.address, f"session-{i:016}")) for i in range(3)]
        async with connected(running.address) as stub:
            while (await stub.Describe(draft_pb2.DescribeRequest())).load.sessions < 3:
                pass
        running.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(running.end(), 60) == 0, running.lines
        assert {await caller for caller in callers} <= {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}


async def test_sigterm_while_loading_ends_with_0(model_dir: Path) -> None:
    async with program("--draft-model", str(model_dir)) as running:
        await running.until("listening")
        running.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(running.end(), 60) == 0, running.lines


async def test_a_model_that_cannot_draft_ends_with_1_and_a_remedy(tmp_path: Path) -> None:
    import mlx.core as mx

    broken = save_tiny_model(tmp_path / "broken", "llama", 1)
    weights = mx.load(str(broken / "model.safetensors"))
    weights["model.norm.weight"] *= float("nan")
    mx.save_safetensors(str(broken / "model.safetensors"), weights, {"format": "mlx"})
    async with program("--draft-model", str(broken)) as running:
        entry = await running.until("cannot_load")
        assert "not finite; choose another draft model" in entry["reason"]
        assert await running.end() == 1


async def test_the_log_names_the_blas(model_dir: Path) -> None:
    async with program("--draft-model", str(model_dir)) as running:
        entry = await running.until("blas")
        assert (entry["kind"], entry["level"]) == ("reference", "info")
