"""Logging: structlog, as lines for people or as JSON, with the ids of request and session bound where they are known."""

from __future__ import annotations

import logging
import sys
from typing import Literal

import structlog
from structlog.typing import Processor

LogFormat = Literal["auto", "console", "json"]


def configure(level: str, style: LogFormat) -> None:
    """Sets up logging for this process, once. "auto" is for people on a terminal and JSON elsewhere."""
    numeric = logging.getLevelNamesMapping()[level.upper()]
    console = style == "console" or (style == "auto" and sys.stderr.isatty())
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=not console),
    ]
    if console:
        final: list[Processor] = [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]
    else:
        final = [structlog.processors.dict_tracebacks, structlog.processors.JSONRenderer()]
    structlog.configure(
        processors=[*shared, *final],
        wrapper_class=structlog.make_filtering_bound_logger(numeric),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=False,
    )
    # Libraries that log by themselves speak only when something is wrong.
    logging.basicConfig(level=max(numeric, logging.WARNING), stream=sys.stderr, force=True)


def get_logger(name: str) -> structlog.typing.FilteringBoundLogger:
    """A logger that names the part of the program it speaks for."""
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger(part=name)
    return logger
