"""The optimizer by name."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.optim import Optimizer

from ..core.errors import OptionError, unknown_name


def optimizer_class(name: str) -> type[Optimizer]:
    """Any optimizer of ``torch.optim`` that steps without a closure, by its name in any case."""
    legal = {
        key.lower(): value
        for key, value in vars(torch.optim).items()
        if inspect.isclass(value) and issubclass(value, Optimizer) and value is not Optimizer and key != "LBFGS"
    }
    if name.lower() not in legal:
        raise OptionError(unknown_name("optimizer", name, legal))
    return legal[name.lower()]


def make_optimizer(name: str, groups: Any, lr: float, weight_decay: float) -> Optimizer:
    """Build it over ``groups`` (parameters or parameter groups); raises OptionError for what it does not take."""
    kind = optimizer_class(name)
    options: dict[str, Any] = {"lr": lr}
    if "weight_decay" in inspect.signature(kind).parameters:
        options["weight_decay"] = weight_decay
    elif weight_decay:
        raise OptionError(f"optimizer '{name}' has no weight decay; option 'weight_decay' is {weight_decay}.")
    return kind(groups, **options)
