"""Makes the engine of exact mode, or says why a model cannot have it."""

from __future__ import annotations

from draftwire.compute import ComputeThread
from draftwire.loaded import LoadedModel
from draftwire.logs import get_logger
from draftwire.models import ModelError
from draftwire.tile_probe import explain, probe
from draftwire.tiles import TILE_ROWS, Tile
from target_service.config import TargetSettings
from target_service.exact_engine import ExactEngine

_log = get_logger("loading")
_REMEDY = "--numerics fast serves it"


async def make_exact_engine(compute: ComputeThread, loaded: LoadedModel, settings: TargetSettings) -> ExactEngine:
    """Looks for a tile at start-up. Raises ModelError with the reason and the remedy where there is none."""
    who = f"{loaded.model_id} cannot be served with --numerics exact"
    if settings.kv_bits is not None:
        raise ModelError(f"{who}: a quantised cache does not run in tiles; leave --kv-bits out, or {_REMEDY}")
    tile = await compute.run(lambda: _tile(loaded, settings.exact_rows, who))
    _log.info("exact_tile", rows=tile.rows, same_bits_for_keys=[list(run) for run in tile.runs])
    return ExactEngine(compute, loaded, tile, settings.prefill_step_size, alone=settings.batching == "off")


def _tile(loaded: LoadedModel, rows: int | None, who: str) -> Tile:
    reason = explain(loaded.model)
    if reason:
        raise ModelError(f"{who}: {reason}, and what is computed from the rest depends on the window; {_REMEDY}")
    sizes = TILE_ROWS if rows is None else (rows,)
    try:
        probed = probe(loaded.model, loaded.head_width, loaded.context_length, sizes=sizes)
    except Exception as failure:
        raise ModelError(
            f"{who}: the model does not take rows of one position each ({type(failure).__name__}); {_REMEDY}"
        ) from failure
    if probed.tile is None:
        other = "another --exact-rows or " if rows is not None else ""
        raise ModelError(
            f"{who}: no tile keeps the bits of a row ({probed.faults}); {other}another --blas may, or {_REMEDY}"
        )
    return probed.tile
