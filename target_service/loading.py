"""Loads a model, warms it up, and builds the target around it."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import replace

from draftwire.blas import BlasInfo
from draftwire.compute import ComputeThread
from draftwire.loaded import LoadedModel
from draftwire.logs import get_logger
from draftwire.models import default_cache_dir
from draftwire.tokenizer import Tokenizer
from target_service.batch_probe import make_engine
from target_service.config import TargetSettings
from target_service.core import Target, TargetParts
from target_service.drafter_link import Identity
from target_service.drafter_pool import DrafterPool
from target_service.requests import Defaults
from target_service.scheduler import Limits

_log = get_logger("loading")

_MEASURED_ROWS = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 17, 24, 32)


async def load_target(
    settings: TargetSettings, blas: BlasInfo, compute: ComputeThread, instance_id: str, stack: AsyncExitStack
) -> Target:
    """A target that is warm and whose round loop runs until `stack` is closed. Raises ModelError."""
    from draftwire.lm import load_model

    cache_dir = settings.cache_dir or default_cache_dir()
    loaded = await compute.run(
        lambda: load_model(
            settings.model,
            dtype=settings.dtype,
            cache_dir=cache_dir,
            revision=settings.revision,
            context_length=settings.context_length,
        )
    )
    assert loaded.path is not None
    tokenizer = Tokenizer(loaded.path)
    engine = await make_engine(compute, loaded, settings.batching)
    stack.push_async_callback(engine.unload)
    # From here on the module is the engine's alone, so that its last reference goes on the compute thread.
    loaded = replace(loaded, model=None)
    measured = await engine.prepare(_MEASURED_ROWS)
    device = await compute.run(_device)
    _log.info(
        "model",
        model=loaded.model_id,
        dtype=loaded.dtype,
        device=device,
        context_length=loaded.context_length,
        note=loaded.context_note,
        batching=engine.batching,
        rollback=engine.rollback.kind or engine.rollback.reason,
        forward_ms={rows: round(seconds * 1e3, 1) for rows, seconds in measured.items()},
    )
    identity = Identity(instance_id=instance_id, fingerprint=tokenizer.fingerprint)
    pool = await stack.enter_async_context(DrafterPool(settings.drafter, identity))
    threads = f", {blas.threads} threads" if blas.threads else ""
    parts = TargetParts(
        loaded=loaded,
        tokenizer=tokenizer,
        defaults=_defaults(settings, loaded, tokenizer),
        limits=_limits(settings, loaded, measured[1]),
        draft_timeout_s=settings.draft_timeout_s,
        device=f"{device} ({blas.kind}{threads})",
        measured=measured,
    )
    return await stack.enter_async_context(Target(parts, engine, pool))


def _defaults(settings: TargetSettings, loaded: LoadedModel, tokenizer: Tokenizer) -> Defaults:
    assert loaded.path is not None
    return Defaults(
        model_id=loaded.model_id,
        context_length=loaded.context_length,
        width=min(loaded.head_width, tokenizer.size),
        end_ids=tokenizer.end_ids(loaded.path),
        max_tokens=settings.max_tokens,
        temperature=settings.temp,
        drafting=settings.drafting,
        num_draft_tokens=settings.num_draft_tokens,
    )


def _limits(settings: TargetSettings, loaded: LoadedModel, forward_s: float) -> Limits:
    return Limits(
        max_running=settings.max_running,
        max_queued=settings.max_queued,
        kv_bytes=settings.kv_bytes_limit,
        kv_bytes_per_token=loaded.kv_bytes_per_token,
        prefill_step_size=settings.prefill_step_size,
        crowd_patience_s=forward_s / 2,
    )


def _device() -> str:
    import mlx.core as mx

    return str(mx.default_device().type).rpartition(".")[2]
