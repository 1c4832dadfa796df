"""`python -m draft_service`: the process around the draft service."""

from __future__ import annotations

import sys

if __name__ == "__main__" and sys.argv[1:2] == ["healthcheck"]:
    # Before the other imports: it runs every few seconds.
    from draftwire.healthcheck import main as healthcheck

    sys.exit(healthcheck(sys.argv[2:], program="draft_service", port=50052))

import asyncio
from collections.abc import Sequence

from draft_service.config import DraftSettings
from draftwire.blas import BlasError, load_blas
from draftwire.logs import configure, get_logger
from draftwire.serving import leave, tune_interpreter
from draftwire.settings import parse


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the service; returns the exit status."""
    settings = parse(DraftSettings, sys.argv[1:] if argv is None else argv, program="draft_service")
    configure(settings.log_level, settings.log_format)
    if settings.source_kind == "model" and not _load_blas(settings):
        return 1
    tune_interpreter()
    from draft_service.program import serve

    return asyncio.run(serve(settings))


def _load_blas(settings: DraftSettings) -> bool:
    """Must come before anything imports mlx."""
    log = get_logger("draft_service")
    try:
        info = load_blas(settings.blas, threads=settings.blas_threads)
    except BlasError as error:
        log.error("cannot_load_blas", reason=str(error))
        return False
    speak = log.warning if info.kind == "reference" and settings.blas != "reference" else log.info
    speak("blas", kind=info.kind, version=info.version, threads=info.threads, reason=info.reason)
    return True


if __name__ == "__main__":
    leave(main())
