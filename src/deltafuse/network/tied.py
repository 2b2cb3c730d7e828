"""Tied weights: a merge must never change the other owner."""

from __future__ import annotations

import torch
from torch import nn

from ..core.messages import say_once


def owners(root: nn.Module) -> dict[int, list[str]]:
    """id of each parameter -> the paths under which modules own it."""
    found: dict[int, list[str]] = {}
    for path, module in root.named_modules(remove_duplicate=True):
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            found.setdefault(id(parameter), []).append(f"{path}.{name}" if path else name)
    return found


@torch.no_grad()
def untie(module: nn.Module, others: list[str], path: str) -> None:
    """Give ``module`` a weight of its own, said by name."""
    weight = module.weight
    module.weight = nn.Parameter(weight.detach().clone(), requires_grad=weight.requires_grad)  # type: ignore[operator, union-attr, arg-type]
    say_once(f"layer '{path}' shared its weight with {', '.join(others)}; it was untied before merging")
