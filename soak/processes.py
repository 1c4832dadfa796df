"""The services as child processes, with their logs in files."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from draftwire.aio_client import AsyncClient
from draftwire.errors import DraftwireError
from draftwire.events import Health
from draftwire.models import resolve
from draftwire.testing_models import save_tiny_model

READY_S = 60.0


@dataclass(slots=True, kw_only=True)
class Service:
    """One service that can be started again and again at its address."""

    name: str
    program: str
    port: int
    flags: Sequence[str]
    log: Path
    usual: Sequence[str] = ()
    """More flags, which one start may replace."""
    process: asyncio.subprocess.Process | None = None
    exits: list[int] = field(default_factory=list)
    """Exit statuses of those that were asked to end."""

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.returncode is None

    async def start(self, *instead: str) -> None:
        """Starts it, with `instead` in the place of the usual flags, and waits until it serves.

        Raises RuntimeError where it does not.
        """
        plain = {key: value for key, value in os.environ.items() if not key.startswith("DRAFTWIRE_")}
        argv = [
            "-m",
            self.program,
            "--port",
            str(self.port),
            "--log-format",
            "json",
            "--threads",
            "1",
            *self.flags,
            *(instead or self.usual),
        ]
        with self.log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, *argv, stdout=asyncio.subprocess.DEVNULL, stderr=log, env=plain
            )
        deadline_s = time.monotonic() + READY_S
        async with AsyncClient(self.address) as client:
            while self.running and time.monotonic() < deadline_s:
                try:
                    if await client.health(timeout_s=1.0) is Health.SERVING:
                        return
                except DraftwireError:
                    pass
                await asyncio.sleep(0.1)
        raise RuntimeError(f"{self.name} does not serve; its log: {self.log}")

    def signal(self, number: int) -> None:
        """Nothing happens where it has ended."""
        if self.running and self.process is not None:
            self.process.send_signal(number)

    async def kill(self) -> None:
        """SIGKILL, and waits."""
        self.signal(signal.SIGKILL)
        if self.process is not None:
            await self.process.wait()

    async def terminate(self, timeout_s: float) -> float:
        """SIGTERM; returns how long it took to end, in seconds. One that takes longer than the timeout is killed."""
        began_s = time.monotonic()
        self.signal(signal.SIGTERM)
        assert self.process is not None
        try:
            self.exits.append(await asyncio.wait_for(self.process.wait(), timeout_s))
        except TimeoutError:
            await self.kill()
            self.exits.append(-signal.SIGKILL)
        return time.monotonic() - began_s


def save_models(folder: Path) -> tuple[Path, Path]:
    """(target, stranger): a tiny random model with SmolLM2's tokenizer, and one with another tokenizer.

    Raises ModelError where SmolLM2, whose tokenizer it takes, was not pulled.
    """
    real = Path(resolve("smollm2-135m"))
    tiny = save_tiny_model(folder / "tiny", "llama", 7, vocab_size=49_152, hidden_size=32, context_length=4096)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json"):
        if (real / name).exists():
            shutil.copy(real / name, tiny / name)
    return tiny, save_tiny_model(folder / "stranger", "llama", 8, context_length=4096)
