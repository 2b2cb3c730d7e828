"""A weight with low-rank deltas merged into it, rounded once: plain, Hadamard product or sum of two pairs.

One launch forward, one backward. Saved: the factors and the tensor scale. The weight is not kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ....primitives.lowrank import lowrank_merge as reference
from ..binding import Fused, bind
from ..kernels import merge
from ..launch import MAX_KERNEL_RANK

SCHEMA = (
    "Tensor? weight, Tensor up1, Tensor down1, Tensor? up2, Tensor? down2, Tensor? scalar, float number, int mode, "
    "ScalarType out_dtype"
)
SAVED = (
    "Tensor up1, Tensor down1, Tensor? up2, Tensor? down2, Tensor? scalar, float number, int mode, "
    "ScalarType weight_dtype"
)


def forward(*args: Any) -> tuple[Tensor]:
    return (merge.forward(*args),)


def fake(weight: Any, up1: Tensor, down1: Tensor, *rest: Any) -> tuple[Tensor]:
    return (up1.new_empty((up1.shape[0], down1.shape[1]), dtype=rest[-1]),)


def save(args: Sequence[Any], outputs: Sequence[Tensor]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    weight, *factors, number, mode, out_dtype = args
    return tuple(factors), (number, mode, out_dtype if weight is None else weight.dtype)


def backward(
    grad: Tensor, up1: Tensor, down1: Tensor, up2: Tensor | None, down2: Tensor | None, scalar: Tensor | None,
    number: float, mode: int, weight_dtype: torch.dtype, needs: Sequence[bool],
) -> tuple[Any, ...]:  # fmt: skip
    """Gradients of weight, both pairs and the scale, in the order of the arguments."""
    dweight = grad.to(weight_dtype, copy=True, memory_format=torch.contiguous_format) if needs[0] else None
    want_up, want_down = needs[1] or needs[3], needs[2] or needs[4]
    found = merge.backward(grad, up1, down1, up2, down2, scalar, number, mode, want_up, want_down, needs[5])
    factors = (found.up1, found.down1, found.up2, found.down2, found.scalar)
    wanted = (item if need else None for item, need in zip(factors, needs[1:6], strict=True))
    return dweight, *wanted, None, None, None


def backward_fake(grad: Tensor, *rest: Any) -> tuple[Any, ...]:
    *factors, _, _, weight_dtype, needs = rest
    dweight = grad.new_empty(grad.shape, dtype=weight_dtype) if needs[0] else None
    wanted = (
        item.new_empty(item.shape) if need and item is not None else None
        for item, need in zip(factors, needs[1:6], strict=True)
    )
    return dweight, *wanted, None, None, None


_run = bind(Fused("lowrank_merge", SCHEMA, 1, forward, fake, save, SAVED, backward, backward_fake))


def lowrank_merge(
    weight: Tensor | None, pairs: tuple[tuple[Tensor, Tensor], ...], scale: Any, mode: str = "product",
    out_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """The primitive of the same name; three pairs, ranks beyond the kernels' and float64 run the reference."""
    tensors = [item for pair in pairs for item in pair] + ([] if weight is None else [weight])
    if isinstance(scale, Tensor):
        tensors.append(scale)
    ranks = [up.shape[1] for up, _ in pairs]
    wide = any(item.dtype == torch.float64 for item in tensors)
    if wide or len(pairs) > 2 or not 0 < min(ranks) <= max(ranks) <= MAX_KERNEL_RANK:
        return reference(weight, pairs, scale, mode, out_dtype)
    number, scalar = (1.0, scale.reshape(())) if isinstance(scale, Tensor) else (float(scale), None)
    second = pairs[1] if len(pairs) == 2 else (None, None)
    kind = merge.ONE if len(pairs) == 1 else merge.SUM if mode == "sum" else merge.PRODUCT
    found: Tensor = _run(weight, *pairs[0], *second, scalar, number, kind, out_dtype or torch.float32)
    return found
