"""Training on one accelerate loop: options, tasks, progress, logs, plots, resume."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import AdapterConfig, JobConfig, TrainConfig
    from .loop import TrainResult, run
    from .task import Task

_HOMES = {
    "AdapterConfig": "config",
    "JobConfig": "config",
    "TrainConfig": "config",
    "TrainResult": "loop",
    "run": "loop",
    "Task": "task",
}
__all__ = ["AdapterConfig", "JobConfig", "Task", "TrainConfig", "TrainResult", "run"]


def __getattr__(name: str) -> Any:
    """Names are looked up on first use: the command line reads the options without loading torch."""
    if name not in _HOMES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
