"""One module that holds base, adapter and loss: what accelerate wraps, moves and casts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..core.errors import TargetError
from .task import Task


class Objective(nn.Module):
    """``forward(batch)`` is the task's loss of the adapted model, a scalar."""

    def __init__(self, task: Task, model: nn.Module, network: nn.Module) -> None:
        super().__init__()
        self.task = task
        self.model = model
        self.network = network

    def forward(self, batch: Any) -> torch.Tensor:
        return self.task.loss(self.model, batch)

    def train(self, mode: bool = True) -> Objective:
        """As usual, but running statistics of a frozen base are never updated."""
        super().train(mode)
        for module in self.model.modules():
            if isinstance(module, _BatchNorm) and not any(p.requires_grad for p in module.parameters()):
                module.eval()
        return self


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Eval mode and no gradients inside; the former mode afterwards."""
    before = module.training
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        module.train(before)


def freeze(model: nn.Module, network: nn.Module) -> None:
    """Take gradients off every parameter of ``model`` that is not the adapter's own."""
    own = {id(parameter) for parameter in network.parameters()}
    for parameter in model.parameters():
        if id(parameter) not in own:
            parameter.requires_grad_(False)


def adapter_groups(network: Any, lr: float) -> list[dict[str, Any]]:
    """Parameter groups with the adapter's trainable parameters only; TargetError where there are none."""
    groups = _as_groups(network.prepare_optimizer_params(lr))
    own = {id(parameter) for parameter in network.parameters()}
    kept = []
    for group in groups:
        params = [p for p in group["params"] if p.requires_grad and id(p) in own]
        if params:
            kept.append({**group, "params": params})
    if not kept:
        raise TargetError("the adapter has no trainable parameter.")
    return kept


def _as_groups(prepared: Any) -> list[dict[str, Any]]:
    """Groups, or bare parameters, as dictionaries."""
    items = list(prepared)
    if items and isinstance(items[0], dict):
        return [{**group, "params": list(group["params"])} for group in items]
    return [{"params": items}]
