"""Makes the prefix cache that the settings ask for."""

from __future__ import annotations

import asyncio
from importlib.metadata import version
from pathlib import Path
from typing import Protocol

from draftwire.loaded import LoadedModel
from draftwire.logs import get_logger
from target_service.prefix.cache import Copies, PrefixCache, PrefixPolicy
from target_service.prefix.counts import PrefixCounts
from target_service.prefix.disk import Disk, DiskUnavailable
from target_service.prefix.identity import files_digest
from target_service.prefix.keys import namespace
from target_service.prefix.layout import Layout

_log = get_logger("prefix")


class PrefixSettings(Protocol):
    """The part of the settings that concerns it."""

    @property
    def prompt_cache_bytes(self) -> int:
        """Of memory; 0 is off."""

    @property
    def prompt_cache_dir(self) -> Path | None:
        """None keeps to memory."""

    @property
    def prompt_cache_disk_bytes(self) -> int:
        """Of disk."""

    @property
    def prefill_step_size(self) -> int:
        """Prompt tokens of a chunk."""


class StoringEngine(Copies, Protocol):
    """An engine that says what its caches consist of."""

    @property
    def layout(self) -> Layout | None:
        """None before it was prepared."""


async def make_prefix_cache(
    settings: PrefixSettings, engine: StoringEngine, loaded: LoadedModel, *, numerics: str, blas: str
) -> PrefixCache | None:
    """None where it is off or the model's cache cannot be stored, which is logged.

    numerics: "fast" or "exact". blas: what multiplies, for the key.
    """
    layout = engine.layout
    if not settings.prompt_cache_bytes or layout is None:
        return None
    if layout.reason:
        _log.warning("no_prefix_cache", model=loaded.model_id, reason=layout.reason)
        return None
    counts = PrefixCounts()
    disk = await _disk(settings, counts)
    exact = numerics == "exact"
    parts = {
        "model": loaded.model_id,
        "revision": loaded.revision,
        "dtype": loaded.dtype,
        "layout": layout.name,
        "numerics": numerics,
        "chunk": settings.prefill_step_size if exact else 0,
        "blas": blas,
        "versions": [version("mlx"), version("mlx-lm")],
        "files": await _digest(loaded, settings) if disk is not None else "",
    }
    policy = PrefixPolicy(base=namespace(parts), exact=exact, chunk=settings.prefill_step_size)
    _log.info(
        "prefix_cache",
        memory_bytes=settings.prompt_cache_bytes,
        bytes_per_token=layout.row_bytes,
        state_bytes=layout.state_bytes,
        disk_bytes=settings.prompt_cache_disk_bytes if disk is not None else 0,
        on_disk=counts.disk_entries,
    )
    return PrefixCache(engine, layout, policy, limit_bytes=settings.prompt_cache_bytes, disk=disk, counts=counts)


async def _disk(settings: PrefixSettings, counts: PrefixCounts) -> Disk | None:
    directory = settings.prompt_cache_dir
    if directory is None:
        return None
    try:
        return await asyncio.to_thread(Disk, directory, settings.prompt_cache_disk_bytes, counts)
    except DiskUnavailable as error:
        _log.warning("prefix_cache_in_memory_only", reason=str(error))
        return None


async def _digest(loaded: LoadedModel, settings: PrefixSettings) -> str:
    assert loaded.path is not None
    assert settings.prompt_cache_dir is not None
    return await asyncio.to_thread(files_digest, loaded.path, settings.prompt_cache_dir)
