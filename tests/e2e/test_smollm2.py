"""The real services with the default model against mlx-lm: same ids, same log-probabilities, whatever drafts.

DRAFTWIRE_TEST_FULL=1 runs 8 prompts x 128 tokens everywhere; else all prompts but the first one have fewer tokens, and a
model that drafts meets each prompt with 2 or with 3 drafts, not with both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Literal

import pytest
from smollm2_fixture import MODEL, DrafterName, Live, Run, Scale, cut_model, live_services
from smollm2_oracle import NearTie, Oracle, compare, opened_oracle
from smollm2_prompts import PROMPTS

from draftwire.events import Completion, DrafterState, FinishReason
from draftwire.models import is_pulled, model_path
from draftwire.sampling import Sampler

pytestmark = pytest.mark.model

EVERY = range(len(PROMPTS))
LOOKUP_DRAFTS = 7
MODES: tuple[Literal["fixed", "auto"], ...] = ("fixed", "auto")
Show = Callable[[str], None]


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """SmolLM2 without its last 5 layers: a drafter that is right now and then."""
    if not is_pulled(MODEL):
        pytest.skip(f"the default model is not here: run `draftwire models pull {MODEL}`")
    with cut_model(model_path(MODEL), tmp_path_factory.mktemp("cut") / "smollm2-25-layers") as folder:
        yield folder


@pytest.fixture(scope="module")
def oracle(cut: Path) -> Iterator[Oracle]:
    with opened_oracle(model_path(MODEL), cut, Scale.chosen()) as opened:
        yield opened


@pytest.fixture(scope="module")
def live(oracle: Oracle, cut: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Asked for after the oracle, which works while the services load."""
    with live_services(cut, tmp_path_factory.mktemp("logs")) as running:
        yield running


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str]) -> Show:
    """Prints past pytest's capture: near-ties and acceptance are part of the result."""

    def printed(line: str) -> None:
        with capsys.disabled():
            print(f"\n  {line}", end="", flush=True)

    return printed


def sampler_of(prompt: int) -> Sampler:
    """Each prompt has a seed of its own."""
    return Sampler(temperature=0.8, top_p=0.95, seed=(1 << 40) + prompt)


def lookup_run(prompt: int, scale: Scale) -> Run:
    return Run(
        drafter="lookup", prompt=prompt, tokens=scale.greedy(prompt), mode="fixed", drafts=LOOKUP_DRAFTS, logprobs=True
    )


def sampled_off(prompt: int, scale: Scale) -> Run:
    return Run(drafter="lookup", prompt=prompt, tokens=scale.sampled, sampler=sampler_of(prompt))


def reconcile(answer: Completion, tokens: int) -> None:
    """L5, and the budget: without an end token each answer has all of its tokens."""
    stats = answer.speculation
    assert answer.finish_reason is FinishReason.MAX_TOKENS
    assert answer.usage.completion_tokens == len(answer.token_ids) == tokens
    assert stats.num_cut_draft_tokens == 0
    assert stats.num_rejected_draft_tokens >= 0
    assert sum(stats.accepted_by_position) == stats.num_accepted_draft_tokens
    assert sum(token.from_draft for token in answer.tokens) == stats.num_accepted_draft_tokens
    # Each forward after the prefill gives one token of the target's own. There is none where all of it was remembered.
    prefills = int(answer.usage.cached_tokens < answer.usage.prompt_tokens - 1)
    assert stats.target_calls - prefills + stats.num_accepted_draft_tokens == tokens


def acceptance(answers: Iterable[Completion]) -> float:
    """Accepted share of all drafts, of which there must be some."""
    stats = [answer.speculation for answer in answers]
    return sum(one.num_accepted_draft_tokens for one in stats) / sum(one.num_draft_tokens for one in stats)


def first_acceptance(answers: Iterable[Completion]) -> float:
    """Accepted share of first drafts: the chance of one token, where later drafts depend on those before."""
    stats = [answer.speculation for answer in answers]
    # A request without a single draft has no positions.
    accepted, drafted = (
        sum(sum(one[:1]) for one in positions)
        for positions in zip(*((one.accepted_by_position, one.drafted_by_position) for one in stats), strict=True)
    )
    return accepted / drafted


def say(show: Show, label: str, answers: list[Completion], ties: Iterable[NearTie | None]) -> None:
    found = [tie for tie in ties if tie is not None]
    listed = "; ".join(f"step {tie.step}, gap {tie.gap:.2g}" for tie in found) or "none"
    stats = [answer.speculation for answer in answers]
    tokens, drafted = sum(len(answer.token_ids) for answer in answers), sum(one.num_draft_tokens for one in stats)
    accepted = sum(one.num_accepted_draft_tokens for one in stats)
    first = f" (the first of a round: {first_acceptance(answers):.3f})" if drafted else ""
    show(f"{label}: {tokens} ids, {accepted} of {drafted} drafts accepted{first}, near-ties: {listed}")


def test_a_chat_becomes_the_prompt_that_mlx_lm_makes(live: Live, oracle: Oracle) -> None:
    for index, (kind, text) in enumerate(PROMPTS):
        ids = live.client.tokenize(messages=[{"role": "user", "content": text}])
        assert list(ids) == oracle.prompt(index), kind


def test_with_lookup_the_ids_are_mlx_lms_plain_ones(live: Live, oracle: Oracle, show: Show) -> None:
    """8 prompts through both processes: 128 ids of the first one, and 40 of each other."""
    answers = [live.run(lookup_run(index, oracle.scale)) for index in EVERY]
    ties = []
    for index, answer in enumerate(answers):
        ties.append(compare(answer.token_ids, oracle.plain(index), f"lookup, {PROMPTS[index][0]}"))
        reconcile(answer, oracle.scale.greedy(index))
    say(show, f"lookup, fixed {LOOKUP_DRAFTS}", answers, ties)
    assert sum(answer.speculation.num_accepted_draft_tokens for answer in answers) > 40


def test_the_streams_text_is_what_all_ids_decode_to(live: Live, oracle: Oracle) -> None:
    for index in EVERY:
        answer = live.run(lookup_run(index, oracle.scale))
        assert answer.text == oracle.text(answer.token_ids)
        assert [chunk.first_step for chunk in answer.chunks] == starts(answer)


def starts(answer: Completion) -> list[int]:
    """Where each chunk must begin for all tokens to come once and in order."""
    return [sum(len(chunk.tokens) for chunk in answer.chunks[:number]) for number in range(len(answer.chunks))]


def test_a_raw_prompts_answer_keeps_its_leading_space(live: Live) -> None:
    answer = live.client.complete("The capital of France is", max_tokens=2)
    assert answer.text.startswith(" Paris")


def test_an_answer_ends_where_mlx_lm_has_the_end_token(live: Live, oracle: Oracle, show: Show) -> None:
    """The end token, an accepted draft or not, is no content and counts as one token."""
    (end_id,) = live.client.model_info().end_token_ids
    lengths = {index: oracle.plain(index).ids.index(end_id) for index in EVERY if end_id in oracle.plain(index).ids}
    index, length = min(lengths.items(), key=lambda item: item[1])
    ending = Run(drafter="lookup", prompt=index, tokens=oracle.scale.greedy(index), mode="fixed", drafts=3, ends=True)
    answer = live.run(ending)
    tie = compare(answer.token_ids, oracle.plain(index), f"ending, {PROMPTS[index][0]}")
    say(show, "with an end token", [answer], [tie])
    if tie is None:
        assert (len(answer.token_ids), answer.finish_reason) == (length, FinishReason.EOS)
        assert answer.usage.completion_tokens == length + 1


def test_logprobs_are_mlx_lms(live: Live, oracle: Oracle) -> None:
    """Up to a near-tie, behind which the texts differ."""
    compared = 0
    for index in EVERY:
        want = oracle.plain(index)
        for token, token_id, logprob in zip(
            live.run(lookup_run(index, oracle.scale)).tokens, want.ids, want.logprobs, strict=False
        ):
            if token.id != token_id:
                break
            assert token.logprob == pytest.approx(logprob, abs=1e-4)
            compared += 1
    assert compared > sum(oracle.scale.greedy(index) for index in EVERY) / 2


def test_logprobs_with_drafts_are_those_without(live: Live, oracle: Oracle, show: Show) -> None:
    """Of the chosen ids and of the two best."""
    plains, ties = [], []
    for index in range(oracle.scale.sampled_prompts):
        plain = live.run(Run(drafter="lookup", prompt=index, tokens=oracle.scale.sampled, logprobs=True))
        reconcile(plain, oracle.scale.sampled)
        assert plain.speculation.num_draft_tokens == 0
        plains.append(plain)
        ties.append(compare(plain.token_ids, oracle.plain(index), f"without drafts, {PROMPTS[index][0]}"))
        for with_drafts, without in zip(live.run(lookup_run(index, oracle.scale)).tokens, plain.tokens, strict=False):
            if with_drafts.id != without.id:
                break
            assert with_drafts.logprob == pytest.approx(without.logprob, abs=1e-4)
            values = [[one.logprob for one in token.top_logprobs] for token in (with_drafts, without)]
            assert len(values[0]) == 2
            assert values[0] == pytest.approx(values[1], abs=1e-4)
    say(show, "without drafts, greedy", plains, ties)


def test_sampled_ids_with_lookup_are_those_without_drafts(live: Live, oracle: Oracle, show: Show) -> None:
    for mode in MODES:
        sampled_equal(live, oracle, show, "lookup", mode)


@pytest.mark.parametrize("drafts", [2, 3])
def test_the_model_drafts_for_itself_nearly_without_fault(live: Live, oracle: Oracle, show: Show, drafts: int) -> None:
    """Ids are mlx-lm's plain and speculative ones. Only near-ties and the other shape of the forward cost a draft."""
    answers = speculative_equal(live, oracle, show, "self", drafts)
    assert acceptance(answers) > 0.95


def test_sampled_ids_with_itself_as_drafter_are_those_without_drafts(live: Live, oracle: Oracle, show: Show) -> None:
    """Noise is shared, so it guesses the sampled ids as well as the greedy ones."""
    answers = sampled_equal(live, oracle, show, "self", "fixed")
    assert acceptance(answers) > 0.9


def test_with_a_cut_model_the_ids_are_mlx_lms(live: Live, oracle: Oracle, show: Show) -> None:
    """25 of 30 layers guess a token right about 4 times in 10, so both ends of a round are met often."""
    answers = [answer for drafts in (2, 3) for answer in speculative_equal(live, oracle, show, "cut", drafts)]
    assert 0.25 <= first_acceptance(answers) <= 0.6


def test_sampled_ids_with_a_cut_model_are_those_without_drafts(live: Live, oracle: Oracle, show: Show) -> None:
    for mode in MODES:
        sampled_equal(live, oracle, show, "cut", mode)


def test_sampled_ids_are_the_best_perturbed_logits_of_mlx_lm(live: Live, oracle: Oracle, show: Show) -> None:
    """The oracle sorts to filter and has no cache; the target does neither."""
    answers, ties = [], []
    for index in range(oracle.scale.sampled_prompts):
        answer = live.run(sampled_off(index, oracle.scale))
        want = oracle.draws(index, answer.token_ids, sampler_of(index))
        ties.append(compare(answer.token_ids, want, f"sampled, {PROMPTS[index][0]}"))
        answers.append(answer)
    say(show, "sampled without drafts, against mlx-lm's logits", answers, ties)


def test_eight_chats_at_once_are_the_same_chats_alone(live: Live, oracle: Oracle, show: Show) -> None:
    """L1 in company, half of them with drafts as they pay: ids may differ first where two ids are nearly as good."""
    tokens = 40
    runs = [
        Run(drafter="lookup", prompt=index, tokens=tokens, mode="auto" if index % 2 else "off", drafts=LOOKUP_DRAFTS)
        for index in EVERY
    ]
    answers = live.at_once(runs)
    for answer in answers:
        reconcile(answer, tokens)
    ties = [
        compare(answers[index].token_ids, oracle.plain(index), f"{PROMPTS[index][0]}, in company") for index in EVERY
    ]
    found = [f"{PROMPTS[index][0]} at {tie.step}, gap {tie.gap:.2g}" for index in EVERY if (tie := ties[index])]
    drafted = sum(one.speculation.num_draft_tokens for one in answers)
    show(f"eight at once: {tokens * len(answers)} ids, {drafted} drafts, near-ties: {'; '.join(found) or 'none'}")
    assert sum(tie is not None for tie in ties) <= 2


def test_the_target_has_one_ready_drafter_at_the_end(live: Live) -> None:
    (drafter,) = live.client.drafters()
    assert drafter.state is DrafterState.READY
    assert live.client.model_info().running == live.client.model_info().queued == 0


def speculative_equal(live: Live, oracle: Oracle, show: Show, drafter: DrafterName, drafts: int) -> list[Completion]:
    """A model drafts a fixed number: ids equal mlx-lm's speculative decoding and its plain one."""
    tokens = oracle.scale.speculative(drafter)
    answers, ties = [], []
    for index in oracle.scale.prompts(drafts):
        answer = live.run(Run(drafter=drafter, prompt=index, tokens=tokens, mode="fixed", drafts=drafts))
        label = f"{drafter}, {drafts} drafts, {PROMPTS[index][0]}"
        ties.append(compare(answer.token_ids, oracle.plain(index), f"{label}, plain"))
        ties.append(compare(answer.token_ids, oracle.speculative(drafter, drafts, index), f"{label}, speculative"))
        reconcile(answer, tokens)
        answers.append(answer)
    say(show, f"{drafter}, fixed {drafts}, greedy", answers, ties)
    return answers


def sampled_equal(
    live: Live, oracle: Oracle, show: Show, drafter: DrafterName, mode: Literal["fixed", "auto"]
) -> list[Completion]:
    """Temperature 0.8, top_p 0.95, a seed: the ids are those without drafts, or part where the best two scores are close."""
    answers, ties = [], []
    for index in range(oracle.scale.sampled_prompts):
        plain = live.run(sampled_off(index, oracle.scale))
        run = Run(
            drafter=drafter,
            prompt=index,
            tokens=oracle.scale.sampled,
            mode=mode,
            drafts=3 if mode == "fixed" else 16,
            sampler=sampler_of(index),
        )
        answer = live.run(run)
        reconcile(answer, oracle.scale.sampled)
        answers.append(answer)
        if answer.token_ids != plain.token_ids:
            label = f"{drafter}, {mode}, sampled, {PROMPTS[index][0]}"
            ties += perturbed_ties(oracle, index, answer.token_ids, plain.token_ids, label)
    say(show, f"{drafter}, {mode}, sampled", answers, ties)
    return answers


def perturbed_ties(
    oracle: Oracle, index: int, got: tuple[int, ...], plain: tuple[int, ...], label: str
) -> list[NearTie | None]:
    """Holds both texts against the oracle's scores, up to their first difference and no further."""
    end = 1 + next(step for step, pair in enumerate(zip(got, plain, strict=True)) if pair[0] != pair[1])
    want = oracle.draws(index, plain, sampler_of(index))
    return [compare(ids[:end], want, label) for ids in (got, plain)]
