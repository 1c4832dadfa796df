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
from target_service.drafter_channel import credentials_of
from target_service.drafter_link import Identity
from target_service.drafter_pool import DrafterPool
from target_service.engine import Engine
from target_service.exact_probe import make_exact_engine
from target_service.grammars import GrammarLimits, Grammars, installed
from target_service.limits import RequestLimits
from target_service.prefix.setup import make_prefix_cache
from target_service.requests import Defaults
from target_service.resolver import Resolver
from target_service.scheduler import Limits

_log = get_logger("loading")

_MEASURED_ROWS = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 17, 24, 32)


async def load_target(
    settings: TargetSettings,
    blas: BlasInfo,
    compute: ComputeThread,
    instance_id: str,
    stack: AsyncExitStack,
    *,
    resolver: Resolver | None = None,
) -> Target:
    """A target that is warm and whose round loop runs until `stack` is closed. Raises ModelError.

    resolver: looks up names of drafters; this machine's where absent.
    """
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
    if settings.numerics == "exact":
        engine: Engine = await make_exact_engine(compute, loaded, settings)
    else:
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
        numerics=settings.numerics if engine.tile is None else f"exact, {engine.tile.rows} rows a forward",
        rollback=engine.rollback.kind or engine.rollback.reason,
        forward_ms={rows: round(seconds * 1e3, 1) for rows, seconds in measured.items()},
    )
    prefixes = await make_prefix_cache(
        settings, engine, loaded, numerics=settings.numerics, blas=f"{device}/{blas.kind}"
    )
    if prefixes is not None:
        stack.push_async_callback(prefixes.end)
    identity = Identity(
        instance_id=instance_id, fingerprint=tokenizer.fingerprint, credentials=credentials_of(settings)
    )
    pool = await stack.enter_async_context(
        DrafterPool(settings.drafter, identity, resolver=resolver, resolve_interval_s=settings.drafter_resolve_s)
    )
    threads = f", {blas.threads} threads" if blas.threads else ""
    parts = TargetParts(
        loaded=loaded,
        tokenizer=tokenizer,
        defaults=_defaults(settings, loaded, tokenizer),
        limits=_limits(settings, loaded),
        draft_timeout_s=settings.draft_timeout_s,
        device=f"{device} ({blas.kind}{threads})",
        measured=measured,
        numerics=settings.numerics,
    )
    grammars = _grammars(settings, tokenizer, engine, parts.defaults.end_ids)
    if grammars is not None:
        stack.push_async_callback(grammars.close)
    return await stack.enter_async_context(Target(parts, engine, pool, grammars=grammars, prefixes=prefixes))


def _grammars(
    settings: TargetSettings, tokenizer: Tokenizer, engine: Engine, end_ids: frozenset[int]
) -> Grammars | None:
    if not installed():
        return None
    limits = GrammarLimits(timeout_s=settings.grammar_timeout_s, cache_bytes=settings.grammar_cache_bytes)
    special = tokenizer.special_ids

    def pieces() -> list[bytes]:
        return [b"" if token in special else tokenizer.piece_bytes(token) for token in range(tokenizer.size)]

    return Grammars(limits, pieces=pieces, width=engine.width, end_ids=end_ids, encoder=tokenizer.plain_encoder)


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
        max_tokens=min(settings.max_tokens, settings.max_output_tokens or settings.max_tokens),
        temperature=settings.temp,
        drafting=settings.drafting,
        num_draft_tokens=settings.num_draft_tokens,
        limits=RequestLimits(
            max_prompt_bytes=settings.max_prompt_bytes,
            max_prompt_tokens=settings.max_prompt_tokens,
            max_output_tokens=settings.max_output_tokens,
            max_stops=settings.max_stops,
            max_stop_chars=settings.max_stop_chars,
            max_stop_token_ids=settings.max_stop_token_ids,
            max_logit_bias=settings.max_logit_bias,
        ),
        grammar_bytes=settings.grammar_max_bytes if installed() else 0,
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
        max_running_per_client=settings.running_per_client,
        one_chunk_size=settings.numerics == "exact",
    )


def _device() -> str:
    import mlx.core as mx

    return str(mx.default_device().type).rpartition(".")[2]
