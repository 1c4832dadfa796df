"""The prefix cache with the default model: what is reused does not change the answer, before and after a restart."""

from __future__ import annotations

from pathlib import Path

import pytest
from smollm2_fixture import MODEL

from client.services import Services, ServicesConfig
from draftwire.client import Client
from draftwire.events import Completion
from draftwire.models import is_pulled

pytestmark = pytest.mark.model
RULES = "You answer in one short sentence. " + "A lighthouse keeper wrote the weather into a small green book. " * 12


def ask(client: Client, question: str) -> Completion:
    messages = [{"role": "system", "content": RULES}, {"role": "user", "content": question}]
    return client.complete(messages=messages, max_tokens=8, ignore_eos=True)


def test_a_shared_system_prompt_is_read_once_and_outlives_the_process(tmp_path: Path) -> None:
    if not is_pulled(MODEL):
        pytest.skip(f"the default model is not here: run `draftwire models pull {MODEL}`")
    flags = ("--prompt-cache-dir", str(tmp_path))
    config = ServicesConfig(model=MODEL, drafter="none", threads=1, target_arguments=flags)
    with Services(config, sink=lambda name, line: None) as services, Client(services.target_address) as client:
        cold = ask(client, "What did he write?")
        other = ask(client, "Where did he write it?")
        again = ask(client, "What did he write?")
    assert cold.usage.cached_tokens == 0
    shared = other.usage.cached_tokens
    assert other.usage.prompt_tokens - 20 < shared < other.usage.prompt_tokens
    assert again.usage.cached_tokens == again.usage.prompt_tokens - 1
    with Services(config, sink=lambda name, line: None) as services, Client(services.target_address) as client:
        restarted = ask(client, "What did he write?")
    assert restarted.usage.cached_tokens >= shared // 32 * 32
    assert cold.token_ids == again.token_ids == restarted.token_ids
