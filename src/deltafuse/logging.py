"""The package's logger: one name, "deltafuse", that stays out of the way.

Records propagate to whatever the application configured. Where nothing is configured, warnings and errors (and lower
levels once ``logger.setLevel`` asks for them) are written to stderr in one plain format; nothing ever goes to stdout.
"""

from __future__ import annotations

import logging
import sys
from typing import TextIO

from .core.messages import say_once

__all__ = ["error_once", "info_once", "logger", "warning_once"]

LOGGER_NAME = "deltafuse"
LOG_FORMAT = "[%(name)s] %(levelname)s: %(message)s"


class _FallbackHandler(logging.StreamHandler):
    """Writes to the current ``sys.stderr``, and only while no other handler would see the record."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)
        self.setFormatter(logging.Formatter(LOG_FORMAT))

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        """Looked up per record, so a redirected stderr is honoured."""
        return sys.stderr

    def emit(self, record: logging.LogRecord) -> None:
        if sys.stderr is not None and not _configured_elsewhere():
            super().emit(record)


def _configured_elsewhere() -> bool:
    """True where the application gave this logger or the root logger a handler of its own."""
    if any(not isinstance(handler, _FallbackHandler) for handler in logger.handlers):
        return True
    return logger.propagate and bool(logging.getLogger().handlers)


def _build() -> logging.Logger:
    built = logging.getLogger(LOGGER_NAME)
    if not any(isinstance(handler, _FallbackHandler) for handler in built.handlers):
        built.addHandler(_FallbackHandler())
    return built


logger = _build()


def info_once(msg: str) -> None:
    """Log ``msg`` at INFO the first time it is said in this process."""
    say_once(msg, logging.INFO)


def warning_once(msg: str) -> None:
    """Log ``msg`` at WARNING the first time it is said in this process."""
    say_once(msg, logging.WARNING)


def error_once(msg: str) -> None:
    """Log ``msg`` at ERROR the first time it is said in this process."""
    say_once(msg, logging.ERROR)
