"""Learning-rate schedules as plain functions of the optimizer step."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ..core.errors import OptionError, unknown_name
from .config import SCHEDULES


def factor(name: str, steps: int, warmup: int = 0) -> Callable[[int], float]:
    """Multiplier of the learning rate at step 0, 1, ...: linear warm-up over ``warmup`` steps, then the schedule."""
    if name not in SCHEDULES:
        raise OptionError(unknown_name("schedule", name, SCHEDULES))

    def at(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        progress = min(1.0, (step - warmup) / max(1, steps - warmup))
        if name == "linear":
            return 1.0 - progress
        if name == "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * progress))
        return 1.0

    return at


def make_scheduler(optimizer: Optimizer, name: str, steps: int, warmup: int = 0) -> LambdaLR:
    """A scheduler to be stepped once per optimizer step."""
    return LambdaLR(optimizer, factor(name, steps, warmup))
