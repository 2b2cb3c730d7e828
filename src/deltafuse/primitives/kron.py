"""Kronecker primitives.

kron_apply: y = (w1 (x) w2) x for x (..., in_m * in_n) -> (..., out_l * out_k); vec(w1 X w2^T) without the product.
kron_merge: w1 (x) w2 -> (out_l * out_k, in_m * in_n, *k) in float32 or better.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.precision import accumulate_dtype, branch_dtype, compute_dtype
from .gemm import plain_math, product
from .registry import primitive


def _chain(x: Tensor, factors: tuple[Tensor, ...]) -> Tensor:
    """x times each factor's transpose in turn, along the last axis."""
    for factor in factors:
        x = product(x, factor.to(x.dtype))
    return x


@primitive("y = (w1 (x) w2) x, either factor low-rank and never rebuilt")
def kron_apply(x: Tensor, w1: tuple[Tensor, ...], w2: tuple[Tensor, ...], w1_first: bool) -> Tensor:
    """w1 and w2 as chains applied left to right: (w,) for a full factor, (b, a) for a @ b.

    w1 maps in_m -> out_l, w2 maps in_n -> out_k; ``w1_first`` is the contraction order.
    """
    in_m, in_n = w1[0].shape[1], w2[0].shape[1]
    grid = x.to(branch_dtype(compute_dtype(x))).unflatten(-1, (in_m, in_n))
    with plain_math(x):
        if not w1_first:
            grid = _chain(grid, w2)
        grid = _chain(grid.transpose(-1, -2), w1).transpose(-1, -2)
        if w1_first:
            grid = _chain(grid, w2)
    return grid.flatten(-2)


@primitive("w1 (x) w2, with the window axes of w2 kept")
def kron_merge(w1: Tensor, w2: Tensor) -> Tensor:
    """w1 (l, m), w2 (k, n, *window) -> (l k, m n, *window)."""
    work = accumulate_dtype(w1, w2)
    window = w2.shape[2:]
    dense = torch.einsum("lm,knw->lkmnw", w1.to(work), w2.to(work).flatten(2) if window else w2.to(work)[..., None])
    out, inp = w1.shape[0] * w2.shape[0], w1.shape[1] * w2.shape[1]
    return dense.reshape(out, inp, *window)
