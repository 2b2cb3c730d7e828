"""Things said once: a fallback or a skipped layer is one line in the log, not one per step."""

from __future__ import annotations

import logging

logger = logging.getLogger("deltafuse")
_said: set[str] = set()


def say_once(message: str, level: int = logging.WARNING) -> None:
    """Log ``message`` the first time it is said in this process."""
    if message not in _said:
        _said.add(message)
        logger.log(level, message)


def forget_said() -> None:
    """Let every message be said again."""
    _said.clear()
