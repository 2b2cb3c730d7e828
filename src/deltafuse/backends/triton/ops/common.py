"""What the operations share: rows, the gradient of a bias, the shapes of gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..kernels import passes, wide


def flat(x: Tensor) -> Tensor:
    """x (..., K) as rows (M, K)."""
    return x.reshape(-1, x.shape[-1])


def passes_for(down: Tensor, x: Tensor) -> Any:
    """Whose passes over x and dY: the kernels' or, at ranks that are products like any other, the library's."""
    return wide if wide.applies(down.shape[0], x.dtype) else passes


def bias_grad(dy: Tensor, bias: Tensor | None, wanted: bool) -> Tensor | None:
    """Column sums of dY (M, N) in the bias's dtype, where a gradient is wanted."""
    return dy.sum(0, dtype=torch.float32).to(bias.dtype) if wanted and bias is not None else None


def empty_grads(leaves: Sequence[Tensor | None], needs: Sequence[bool]) -> tuple[Any, ...]:
    """A contiguous tensor of each leaf's shape and dtype where its gradient is needed: what a fake backward returns."""
    return tuple(
        leaf.new_empty(leaf.shape) if leaf is not None and need else None
        for leaf, need in zip(leaves, needs, strict=True)
    )
