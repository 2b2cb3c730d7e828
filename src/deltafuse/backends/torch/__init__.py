"""Plain PyTorch: runs every primitive on every device, and is what all others are measured against."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...core.problem import Problem
from ...core.verdict import Verdict
from ...primitives import get_primitive
from ..registry import Backend, register_backend


class TorchBackend(Backend):
    """The references themselves."""

    name = "torch"
    order = 100
    summary = "plain PyTorch operations"

    def available(self, device: torch.device | None = None) -> Verdict:
        return Verdict(True, f"PyTorch {torch.__version__}")

    def verdict(self, primitive: str, problem: Problem) -> Verdict:
        return Verdict(True, "any shape, dtype and device")

    def implementation(self, primitive: str) -> Callable[..., Any]:
        return get_primitive(primitive).reference


register_backend(TorchBackend())
