"""Loads a model, warms it up, and builds the target around it."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import replace

from draftwire.blas import BlasInfo
from draftwire.caches import CacheFormatError, KvQuantisation
from draftwire.compute import ComputeThread
from draftwire.loaded import LoadedModel
from draftwire.logs import get_logger
from draftwire.models import ModelError, default_cache_dir
from draftwire.tokenizer import Tokenizer
from target_service.batch_probe import make_engine
from target_service.config import TargetSettings
from target_service.core import Target, TargetParts
from target_service.drafter_link import Identity
from target_service.drafter_pool import DrafterPool
from target_service.engine import Engine
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
    quantisation = KvQuantisation(settings.kv_bits, settings.kv_group_size) if settings.kv_bits else None
    engine = await make_engine(compute, loaded, settings.batching, quantisation)
    stack.push_async_callback(engine.unload)
    # From here on the module is the engine's alone, so that its last reference goes on the compute thread.
    loaded = replace(loaded, model=None)
    measured = await _prepare(engine, settings, loaded)
    loaded = replace(loaded, kv_bytes_per_token=engine.kv_bytes_per_token or loaded.kv_bytes_per_token)
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
        limits=_limits(settings, loaded),
        draft_timeout_s=settings.draft_timeout_s,
        device=f"{device} ({blas.kind}{threads})",
        measured=measured,
    )
    return await stack.enter_async_context(Target(parts, engine, pool))


async def _prepare(engine: Engine, settings: TargetSettings, loaded: LoadedModel) -> dict[int, float]:
    """Warms up. Raises ModelError where the model cannot be served as the settings ask."""
    try:
        measured = await engine.prepare(_MEASURED_ROWS)
    except CacheFormatError as error:
        raise ModelError(f"{loaded.model_id} cannot have a quantised cache: {error}; leave --kv-bits out") from error
    reason = engine.rollback.reason
    if reason and settings.drafting == "fixed":
        raise ModelError(
            f"{loaded.model_id} cannot be served with --drafting fixed: {reason}; --drafting auto serves it without drafts"
        )
    if reason:
        _log.warning("no_drafting", model=loaded.model_id, reason=reason)
    return measured


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


def _limits(settings: TargetSettings, loaded: LoadedModel) -> Limits:
    return Limits(
        max_running=settings.max_running,
        max_queued=settings.max_queued,
        kv_bytes=settings.kv_bytes_limit,
        kv_bytes_per_token=loaded.kv_bytes_per_token,
        # The state, and what a rollback goes back to.
        state_bytes=2 * loaded.state_bytes,
        prefill_step_size=settings.prefill_step_size,
    )


def _device() -> str:
    import mlx.core as mx

    return str(mx.default_device().type).rpartition(".")[2]
