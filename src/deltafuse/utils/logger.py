"""The package's logger under the path older scripts import it from."""

from __future__ import annotations

from ..logging import logger

__all__ = ["logger"]
