"""LoHa: dW = gamma * (w1u w1d) * (w2u w2d), elementwise; with Tucker cores each side is a Tucker product.

Shapes: w1d, w2d (r, in[, *k]) and w1u, w2u (out, r). With t1, t2 (r, r, *k): w1d, w2d (r, in) and w1u, w2u (r, out).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..core.geometry import LayerOp
from ..deltas import Hadamard
from ..deltas.base import Scalar
from ._run import branch, kernels_for, layer_op, promoted

Factors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]


def weight_gen(org_weight: Tensor, rank: int, tucker: bool = True) -> Factors:
    """Fresh (w1d, w1u, w2d, w2u, t1, t2) for a weight (out, in, *k): normal with deviation 1, 0, 1, 0.1, 0.1, 0.1."""
    out, inp, *kernel = org_weight.shape
    core = tucker and bool(kernel)
    down = (rank, inp) if core else (rank, inp, *kernel)
    up = (rank, out) if core else (out, rank)
    t1 = t2 = None
    if core:
        t1, t2 = 0.1 * torch.randn(rank, rank, *kernel), 0.1 * torch.randn(rank, rank, *kernel)
    return torch.randn(down), torch.zeros(up), torch.randn(down), 0.1 * torch.randn(up), t1, t2


def _delta(weights: tuple[Tensor | None, ...], options: Mapping[str, Any] | None) -> tuple[Hadamard, LayerOp]:
    w1d, w1u, w2d, w2u, *cores = weights
    t1, t2 = cores if cores else (None, None)
    assert w1d is not None
    assert w1u is not None
    assert w2d is not None
    assert w2u is not None
    if t1 is None or t2 is None:
        op = layer_op((w1u.shape[0], *w1d.shape[1:]), options)
        return Hadamard(w1u, w1d.flatten(1), w2u, w2d.flatten(1), 1.0), op
    op = layer_op((w1u.shape[1], w1d.shape[1], *t1.shape[2:]), options)
    return Hadamard(w1u.t(), w1d, w2u.t(), w2d, 1.0, t1, t2), op


def diff_weight(*weights: Tensor | None, gamma: Scalar = 1.0, backend: str | None = None) -> Tensor:
    """dW (out, in, *k) from (w1d, w1u, w2d, w2u, t1, t2), in the factors' dtype; ``gamma`` a float or a 0-d tensor."""
    delta, op = _delta(weights, None)
    dtype = promoted(*weights)
    kernels = kernels_for(delta.merge_uses(op), op, delta.up1, backend)
    down1, down2 = delta.down1, delta.down2
    if delta.mid1 is not None and delta.mid2 is not None:
        down1 = kernels.tucker_fold(delta.mid1, down1).flatten(1)
        down2 = kernels.tucker_fold(delta.mid2, down2).flatten(1)
    pairs = ((delta.up1, down1), (delta.up2, down2))
    dense = kernels.lowrank_merge(None, pairs, delta.scalar(gamma), "product", dtype)
    return dense.view(op.weight_shape).to(dtype)


def bypass_forward_diff(
    x: Tensor,
    org_out: Tensor | None,
    *weights: Tensor | None,
    gamma: Scalar = 1.0,
    extra_args: Mapping[str, Any] | None = None,
    backend: str | None = None,
) -> Tensor:
    """dW x, as a rank-r^2 product where that is the cheaper form. ``org_out`` is not used."""
    delta, op = _delta(weights, extra_args)
    names = ("khatri_rao",) if op.is_conv else ("khatri_rao", "lowrank_down", "lowrank_up")
    return branch(delta, x, op, gamma, names, backend)


def make_weight(w1d: Tensor, w1u: Tensor, w2d: Tensor, w2u: Tensor, scale: Scalar) -> Tensor:
    """:func:`diff_weight` of matrices."""
    return diff_weight(w1d, w1u, w2d, w2u, None, None, gamma=scale)


def make_weight_tucker(
    t1: Tensor, w1d: Tensor, w1u: Tensor, t2: Tensor, w2d: Tensor, w2u: Tensor, scale: Scalar
) -> Tensor:
    """:func:`diff_weight` with Tucker cores."""
    return diff_weight(w1d, w1u, w2d, w2u, t1, t2, gamma=scale)
