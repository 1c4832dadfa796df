"""SmolLM2 as the services give it over gRPC: how much is asked, of which drafters, and the answers, each made once."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Literal, TypeAlias

from smollm2_prompts import PROMPTS

from client.services import Services, ServicesConfig
from client.up import terminated_like_interrupted
from draftwire.client import Client
from draftwire.events import Completion
from draftwire.layers import cut_layers
from draftwire.sampling import Sampler

DrafterName: TypeAlias = Literal["lookup", "self", "cut"]

MODEL: Final = "smollm2-135m"
CUT_LAYERS: Final = 25
_SWAP_TRIES: Final = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Tokens a prompt, and how many prompts. The small size is for CI; DRAFTWIRE_TEST_FULL=1 chooses the full one."""

    deep: int = 128
    deep_prompts: int = 1
    """Of so many prompts, the first ones, the plain text is longer."""
    plain: int = 40
    by_self: int = 16
    by_cut: int = 16
    sampled: int = 16
    sampled_prompts: int = 3
    every_width: bool = False
    """Whether each prompt meets each number of drafts of a model, and not every second prompt one of them."""

    @staticmethod
    def chosen() -> Scale:
        """What the environment asks for."""
        if os.environ.get("DRAFTWIRE_TEST_FULL") == "1":
            every = len(PROMPTS)
            return Scale(
                deep_prompts=every, by_self=128, by_cut=128, sampled=128, sampled_prompts=every, every_width=True
            )
        return Scale()

    def greedy(self, prompt: int) -> int:
        """Tokens of this prompt with the lookup."""
        return self.deep if prompt < self.deep_prompts else self.plain

    def prompts(self, drafts: int) -> Sequence[int]:
        """The prompts for which a model drafts so many tokens."""
        every = range(len(PROMPTS))
        return every if self.every_width else every[drafts % 2 :: 2]

    def speculative(self, drafter: DrafterName) -> int:
        """Tokens a prompt with a model that drafts."""
        return self.by_self if drafter == "self" else self.by_cut


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One request to the services."""

    drafter: DrafterName
    prompt: int
    tokens: int
    mode: Literal["off", "fixed", "auto"] = "off"
    drafts: int = 16
    sampler: Sampler = field(default_factory=Sampler)
    logprobs: bool = False
    ends: bool = False
    """Whether an end token ends the answer."""


class Live:
    """A running target whose drafter can be exchanged for another. Each run happens once; its answer is kept."""

    def __init__(self, services: Services, client: Client, draft_models: Mapping[DrafterName, str]) -> None:
        self.client = client
        self._services = services
        self._draft_models = draft_models
        self._drafter: DrafterName = "lookup"
        self._done: dict[Run, Completion] = {}

    def run(self, run: Run) -> Completion:
        """The answer, with that drafter beside the target."""
        if run not in self._done:
            if run.mode != "off":
                self._use(run.drafter)
            self._done[run] = self._complete(run)
        return self._done[run]

    def at_once(self, runs: Sequence[Run]) -> list[Completion]:
        """The answers to runs that share the target's forwards. Made anew each time: company is what they are for."""
        for run in runs:
            if run.mode != "off":
                self._use(run.drafter)
        with ThreadPoolExecutor(len(runs)) as threads:
            return list(threads.map(self._complete, runs))

    def _complete(self, run: Run) -> Completion:
        return self.client.complete(
            messages=[{"role": "user", "content": PROMPTS[run.prompt][1]}],
            max_tokens=run.tokens,
            ignore_eos=not run.ends,
            drafting=run.mode,
            num_draft_tokens=run.drafts,
            temperature=run.sampler.temperature,
            top_p=run.sampler.top_p,
            seed=run.sampler.seed,
            top_logprobs=2 if run.logprobs else None,
        )

    def _use(self, drafter: DrafterName) -> None:
        """Ends the running drafter and starts another at its address, under the same target."""
        if drafter == self._drafter:
            return
        model = self._draft_models.get(drafter)
        kind: Literal["lookup", "model"] = "model" if model else "lookup"
        self._services.config = replace(self._services.config, drafter=kind, draft_model=model)
        self._services.restart_drafter()
        self._drafter = drafter
        for _ in range(_SWAP_TRIES):
            # The target sees the change when it next asks; a request makes it ask.
            self.client.complete("one two one two", max_tokens=8, ignore_eos=True)
            (seen,) = self.client.drafters()
            if seen.source_kind == kind and seen.model_id == (Path(model).name if model else ""):
                return
        raise AssertionError(f"the target still sees {seen} after {_SWAP_TRIES} requests")


@contextmanager
def cut_model(target: Path, folder: Path) -> Iterator[Path]:
    """SmolLM2's first 25 of 30 layers in a new folder, which is removed afterwards: it is 450 MB."""
    try:
        cut_layers(target, folder, CUT_LAYERS)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def live_services(cut: Path, log_dir: Path) -> Iterator[Live]:
    """Both services with one thread each, at first with the lookup."""
    # Long patience: on a busy machine a late draft must not turn a test of drafts into one of plain decoding.
    patience = ("--draft-timeout-s", "20")
    config = ServicesConfig(model=MODEL, threads=1, target_arguments=patience)
    # A job that cancels the tests sends SIGTERM: then too the services must go.
    with (
        terminated_like_interrupted(),
        Services(config, log_dir=log_dir) as services,
        Client(services.target_address, timeout_s=600.0) as client,
    ):
        yield Live(services, client, {"self": MODEL, "cut": str(cut)})
