"""Logging: structlog, as lines for people or as JSON, with the ids of request and session bound where they are known."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Literal

import structlog
from structlog.typing import Processor

_PROMPT_CHARS = 200
_PROMPT_IDS = 64

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
    # Tracebacks without the values of variables: among them are prompts, answers and tokens.
    if console:
        plain = structlog.dev.plain_traceback
        final: list[Processor] = [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=plain)]
    else:
        frames = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
        final = [structlog.processors.ExceptionRenderer(frames), structlog.processors.JSONRenderer()]
    structlog.configure(
        processors=[*shared, *final],
        wrapper_class=structlog.make_filtering_bound_logger(numeric),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=False,
    )
    # Libraries that log by themselves speak only when something is wrong.
    logging.basicConfig(level=max(numeric, logging.WARNING), stream=sys.stderr, force=True)


def beginning(text: str, token_ids: Sequence[int]) -> dict[str, str | int | list[int]]:
    """Fields of a log line about a prompt: its beginning only. For `--log-prompts`; nothing else may log a prompt."""
    shown = text if len(text) <= _PROMPT_CHARS else text[:_PROMPT_CHARS] + "..."
    return {"text": shown, "token_ids": list(token_ids[:_PROMPT_IDS]), "prompt_tokens": len(token_ids)}


def get_logger(name: str) -> structlog.typing.FilteringBoundLogger:
    """A logger that names the part of the program it speaks for."""
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger(part=name)
    return logger
