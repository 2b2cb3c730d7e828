"""Low-rank primitives.

lowrank_down: h = x A^T, x (..., K), A (r, K) -> h (..., r) in float32 for float16 inputs, else in the compute dtype.
lowrank_up: y = h B^T, h (..., r), B (N, r) -> (..., N).
lowrank_merge: [W +] s {B A, (B1 A1) * (B2 A2), B1 A1 + B2 A2} for W (N, K), B (N, r), A (r, K) -> (N, K).
tucker_fold: sum_q mid[p, q, k] down[q, i] -> (p, I, *k), the core and the down factor as one wide down factor.
tucker_merge: sum_pq up[o, p] mid[p, q, k] down[q, i] -> (N, I, *k).
khatri_rao: both factors of (B1 A1) * (B2 A2) as one low-rank product of rank r1 r2.

Merges and products of factors accumulate in float32 or better. ``out_dtype`` is what a result is rounded to, once; None
leaves the accumulation dtype, and float64 stays float64 whatever is asked for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.precision import accumulate_dtype, branch_dtype, compute_dtype
from .examples import Draw, Sizes, example
from .gemm import plain_math, product
from .registry import primitive


class _HalfDown(torch.autograd.Function):
    """float16 x against A in float32: keeps the float16 x for the backward pass instead of its float32 copy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, down: Tensor) -> Tensor:
        ctx.save_for_backward(x, down)
        return product(x.float(), down)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (grad,) = grads
        x, down = ctx.saved_tensors
        dx = product(grad, down.t()).to(x.dtype) if ctx.needs_input_grad[0] else None
        rows = grad.reshape(-1, grad.shape[-1])
        da = rows.t() @ x.reshape(-1, x.shape[-1]).float() if ctx.needs_input_grad[1] else None
        return dx, da


@primitive("h = x A^T")
def lowrank_down(x: Tensor, down: Tensor) -> Tensor:
    """See the module's formula."""
    wanted = compute_dtype(x)
    work = branch_dtype(wanted)
    if wanted == torch.float16:
        return _HalfDown.apply(x.to(wanted), down.to(work))
    return product(x.to(work), down.to(work))


@primitive("y = h B^T")
def lowrank_up(h: Tensor, up: Tensor) -> Tensor:
    """See the module's formula."""
    return product(h, up.to(h.dtype))


Pair = tuple[Tensor, Tensor]


def rounded(result: Tensor, out_dtype: torch.dtype | None) -> Tensor:
    """``result`` in ``out_dtype``, unless that is None or the result is float64."""
    return result if out_dtype is None or result.dtype == torch.float64 else result.to(out_dtype)


@primitive("[W +] s B A, s (B1 A1) * (B2 A2) or s (B1 A1 + B2 A2)")
def lowrank_merge(
    weight: Tensor | None,
    pairs: tuple[Pair, ...],
    scale: Any,
    mode: str = "product",
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """scale (a number or a 0-d tensor) times the elementwise product, or with ``mode`` "sum" the sum, of up @ down over
    ``pairs``, added to ``weight`` (N, K) where given."""
    work = accumulate_dtype(weight, *(factor for pair in pairs for factor in pair))
    (up, down), *rest = pairs
    with plain_math(up):
        if not rest and weight is not None and isinstance(scale, (int, float)):
            return rounded(torch.addmm(weight.to(work), up.to(work), down.to(work), alpha=scale), out_dtype)
        delta = up.to(work) @ down.to(work)
        for other_up, other_down in rest:
            other = other_up.to(work) @ other_down.to(work)
            delta = delta + other if mode == "sum" else delta * other
    delta = delta * scale
    return rounded(delta if weight is None else weight.to(work) + delta, out_dtype)


@primitive("Tucker core times down: sum over q of mid[p, q, k] down[q, i]")
def tucker_fold(mid: Tensor, down: Tensor) -> Tensor:
    """mid (p, q, *k), down (q, I) -> (p, I, *k)."""
    work = accumulate_dtype(mid, down)
    with plain_math(mid):
        inner = torch.einsum("pqk,qi->pik", mid.to(work).flatten(2), down.to(work))
    return inner.unflatten(2, mid.shape[2:])


@primitive("Tucker: sum over p, q of up[o, p] mid[p, q, k] down[q, i]")
def tucker_merge(up: Tensor, mid: Tensor, down: Tensor) -> Tensor:
    """up (N, p), mid (p, q, *k), down (q, I) -> (N, I, *k)."""
    work = accumulate_dtype(up, mid, down)
    inner = tucker_fold(mid.to(work), down.to(work))
    with plain_math(up):
        return (up.to(work) @ inner.flatten(1)).unflatten(1, inner.shape[1:])


@primitive("both factors of (B1 A1) * (B2 A2) as one product of rank r1 r2")
def khatri_rao(
    up1: Tensor, down1: Tensor, up2: Tensor, down2: Tensor, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """up[n, i q + j] = up1[n, i] up2[n, j] and down[i q + j, k] = down1[i, k] down2[j, k], q being up2's rank.

    down comes in ``out_dtype``, up in the accumulation dtype: scales still multiply it before it is rounded.
    """
    work = accumulate_dtype(up1, down1, up2, down2)
    up = (up1.to(work).unsqueeze(2) * up2.to(work).unsqueeze(1)).flatten(1)
    down = (down1.to(work).unsqueeze(1) * down2.to(work).unsqueeze(0)).flatten(0, 1)
    return up, rounded(down, out_dtype)


def _pair(sizes: Sizes, draw: Draw, extra: int = 0) -> Pair:
    rank = sizes.rank + extra
    return draw.factor(sizes.out, rank), draw.factor(rank, sizes.inner, scale=sizes.inner**-0.5)


@example("lowrank_merge", "one pair, W, rounded")
def _merge_rounded(sizes: Sizes, draw: Draw) -> tuple[Any, ...]:
    return draw.weight(sizes.out, sizes.inner), (_pair(sizes, draw),), 0.7, "product", draw.dtype


@example("lowrank_merge", "one pair, W, tensor scale")
def _merge_scaled(sizes: Sizes, draw: Draw) -> tuple[Any, ...]:
    return draw.weight(sizes.out, sizes.inner), (_pair(sizes, draw),), draw.positive()


@example("lowrank_merge", "Hadamard, W, rounded")
def _merge_hadamard(sizes: Sizes, draw: Draw) -> tuple[Any, ...]:
    pairs = (_pair(sizes, draw), _pair(sizes, draw, 1))
    return draw.weight(sizes.out, sizes.inner), pairs, 0.7, "product", draw.dtype


@example("lowrank_merge", "Hadamard, tensor scale")
def _merge_hadamard_scaled(sizes: Sizes, draw: Draw) -> tuple[Any, ...]:
    scale, weight = draw.positive(), draw.weight(sizes.out, sizes.inner).requires_grad_()
    return weight, (_pair(sizes, draw), _pair(sizes, draw)), scale


@example("lowrank_merge", "sum, W, tensor scale, rounded")
def _merge_sum(sizes: Sizes, draw: Draw) -> tuple[Any, ...]:
    scale, pairs = draw.positive(), (_pair(sizes, draw), _pair(sizes, draw, 1))
    return draw.weight(sizes.out, sizes.inner), pairs, scale, "sum", draw.dtype


@example("tucker_fold", "3x3 core")
def _fold(sizes: Sizes, draw: Draw) -> tuple[Any, ...]:
    return draw.factor(sizes.rank, sizes.rank + 1, 3, 3), draw.factor(sizes.rank + 1, sizes.inner)


@example("tucker_merge", "3x3 core")
def _tucker(sizes: Sizes, draw: Draw) -> tuple[Any, ...]:
    return draw.factor(sizes.out, sizes.rank), *_fold(sizes, draw)


@example("khatri_rao", "layer's dtype")
def _khatri_rao(sizes: Sizes, draw: Draw) -> tuple[Any, ...]:
    return *_pair(sizes, draw), *_pair(sizes, draw, 1), draw.dtype


@example("khatri_rao", "accumulation dtype")
def _khatri_rao_wide(sizes: Sizes, draw: Draw) -> tuple[Any, ...]:
    return *_pair(sizes, draw), *_pair(sizes, draw)
