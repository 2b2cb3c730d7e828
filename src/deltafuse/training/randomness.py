"""All random state of a process: capture, restore, guard."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy
import torch

from ..core.optional import require


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch on every device."""
    require("accelerate.utils", extra="train", purpose="training").set_seed(seed)


def random_state() -> dict[str, Any]:
    """Everything as tensors, numbers and strings, so that it can be stored without pickled objects."""
    name, keys, position, has_gauss, cached = cast("tuple[Any, ...]", numpy.random.get_state(legacy=True))
    version, internal, gauss = random.getstate()
    return {
        "python": [version, list(internal), gauss],
        "numpy": [name, torch.from_numpy(keys.astype("int64")), position, has_gauss, cached],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Undo everything that happened since :func:`random_state`."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    numpy.random.set_state((name, keys.numpy().astype("uint32"), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.device_count() == len(state["cuda"]):
        torch.cuda.set_rng_state_all(state["cuda"])


@contextmanager
def guarded(seed: int) -> Iterator[None]:
    """Inside, the random state starts from ``seed``; outside, nothing has happened."""
    state = random_state()
    seed_everything(seed)
    try:
        yield
    finally:
        restore_random_state(state)
