"""Which engine serves a model: the one with a forward for all, or the one that runs sequences one by one."""

from __future__ import annotations

from typing import Literal

from draftwire.caches import KvQuantisation
from draftwire.compute import ComputeThread
from draftwire.loaded import LoadedModel
from draftwire.logs import get_logger
from draftwire.ragged_probe import learn_beside, why_not
from target_service.batch_engine import BatchEngine
from target_service.engine import Engine

_log = get_logger("loading")


async def make_engine(
    compute: ComputeThread,
    loaded: LoadedModel,
    batching: Literal["auto", "off"],
    quantisation: KvQuantisation | None = None,
) -> Engine:
    """The engine that suits the model; why it is not the batching one is logged and kept in `batching`."""
    if batching == "off":
        reason = "switched off"
    elif quantisation is not None:
        reason = "a quantised cache does not batch"
    else:
        reason = await compute.run(lambda: why_not(loaded))
    if not reason:
        unfit = await compute.run(lambda: learn_beside(loaded))
        if unfit:
            _log.info("prompts_alone", reason=unfit)
        return BatchEngine(compute, loaded, beside=not unfit)
    engine = Engine(compute, loaded, quantisation)
    engine.batching = f"one by one: {reason}"
    if batching != "off":
        _log.warning("one_by_one", reason=reason)
    return engine
