"""What the planner decides about, and what it decided."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from .cost import Cost
from .geometry import LayerOp


@dataclass(frozen=True)
class Problem:
    """One layer call, hashable: geometry, row bucket (``rows.bit_length()``), dtype, device, and the modes in force."""

    op: LayerOp
    bucket: int
    dtype: torch.dtype
    device: torch.device
    training: bool

    @property
    def rows(self) -> int:
        """The middle of the bucket, which every row count in it is planned as."""
        return max(1, (3 << self.bucket) >> 2)


@dataclass(frozen=True)
class Plan:
    """form ("bypass", "merged" or "split"), the backend that runs it, why, its kernels, and the costs compared."""

    form: str
    backend: str
    reason: str
    kernels: Any = field(compare=False, repr=False, default=None)
    cost: Cost = field(default_factory=Cost)
