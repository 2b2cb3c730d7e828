"""Tucker deltas: the core and the down factor folded into one wide down factor, then a low-rank product.

tucker_fold: one launch each way; saved: mid and down. tucker_merge: the fold and a low-rank merge, two launches each
way; the fold's result (p, I, *k) is kept too, so backward reads dW twice and folds nothing again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ....primitives.lowrank import tucker_fold as reference
from ....primitives.lowrank import tucker_merge as merge_reference
from ..binding import Fused, bind
from ..kernels import tucker
from ..launch import MAX_KERNEL_RANK
from .lowrank_merge import lowrank_merge


def forward(mid: Tensor, down: Tensor) -> tuple[Tensor]:
    """inner (p, I, V) for mid (p, q, V)."""
    return (tucker.forward(mid, down),)


def fake(mid: Tensor, down: Tensor) -> tuple[Tensor]:
    return (mid.new_empty((mid.shape[0], down.shape[1], mid.shape[2]), dtype=torch.float32),)


def save(args: Sequence[Any], outputs: Sequence[Tensor]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    return tuple(args), ()


def backward(grad: Tensor, mid: Tensor, down: Tensor, needs: Sequence[bool]) -> tuple[Any, ...]:
    return tucker.backward(grad, mid, down, needs[0], needs[1])


def backward_fake(grad: Tensor, mid: Tensor, down: Tensor, needs: Sequence[bool]) -> tuple[Any, ...]:
    pairs = zip((mid, down), needs, strict=True)
    return tuple(item.new_empty(item.shape) if need else None for item, need in pairs)


_run = bind(
    Fused("tucker_fold", "Tensor mid, Tensor down", 1, forward, fake, save, "Tensor mid, Tensor down", backward,
          backward_fake)
)  # fmt: skip


def _fits(*tensors: Tensor) -> bool:
    return not any(item.dtype == torch.float64 or item.numel() == 0 for item in tensors)


def tucker_fold(mid: Tensor, down: Tensor) -> Tensor:
    """The primitive of the same name; float64 and empty tensors run the reference."""
    if not _fits(mid, down):
        return reference(mid, down)
    inner: Tensor = _run(mid.flatten(2), down)
    return inner.unflatten(2, mid.shape[2:])


def tucker_merge(up: Tensor, mid: Tensor, down: Tensor) -> Tensor:
    """The primitive of the same name; a rank beyond the kernels', float64 and empty tensors run the reference."""
    if up.shape[1] > MAX_KERNEL_RANK or not _fits(up, mid, down):
        return merge_reference(up, mid, down)
    inner: Tensor = _run(mid.flatten(2), down)
    dense = lowrank_merge(None, ((up, inner.flatten(1)),), 1.0)
    return dense.view(up.shape[0], down.shape[1], *mid.shape[2:])
