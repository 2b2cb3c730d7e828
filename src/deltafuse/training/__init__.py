"""Training on one accelerate loop: options, tasks, progress, logs, plots, resume."""

from __future__ import annotations

from .config import AdapterConfig, JobConfig, TrainConfig
from .loop import TrainResult, run
from .task import Task

__all__ = ["AdapterConfig", "JobConfig", "Task", "TrainConfig", "TrainResult", "run"]
