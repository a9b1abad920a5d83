"""Logs of a process: structlog to stderr, for people (console) or for machines (one JSON object a line)."""

from __future__ import annotations

import logging
import sys
from typing import Literal

import structlog
import structlog.tracebacks

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["console", "json"]


def configure_logging(level: LogLevel = "info", log_format: LogFormat = "console", **context: str) -> None:
    """Sets the logs of the whole process up; `context` (service=...) is part of every line."""
    threshold = getattr(logging, level.upper())
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            *_stamping(log_format),
            _adding(context),
            *_rendering(log_format),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
    # Libraries log through the standard library; only what is worth a look goes through.
    logging.basicConfig(stream=sys.stderr, level=max(threshold, logging.WARNING), format="%(name)s: %(message)s")


def _adding(context: dict[str, str]) -> structlog.typing.Processor:
    def add(logger: object, method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        return {**context, **event}

    return add


def _stamping(log_format: LogFormat) -> list[structlog.typing.Processor]:
    if log_format == "json":
        return [structlog.processors.TimeStamper(fmt="iso", utc=True)]
    return [structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False)]


def _rendering(log_format: LogFormat) -> list[structlog.typing.Processor]:
    if log_format == "json":
        # Without the locals, which hold prompts and cache salts.
        transform = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
        return [structlog.processors.ExceptionRenderer(transform), structlog.processors.JSONRenderer()]
    colours = sys.stderr.isatty()
    plain = structlog.dev.plain_traceback
    return [structlog.dev.ConsoleRenderer(colors=colours, exception_formatter=plain, pad_event_to=0, sort_keys=False)]
