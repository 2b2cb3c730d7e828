"""LoKr: dW = scale * w1 (x) w2, either factor whole or low-rank, w2 carrying a convolution's window.

Shapes, with out = out_l out_k and in = in_m in_n: w1 (out_l, in_m) or w1a (out_l, r), w1b (r, in_m); w2 (out_k, in_n,
*k) or w2a (out_k, r), w2b (r, in_n[, *k]); with a Tucker core t (r, r, *k): w2a (r, out_k), w2b (r, in_n).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..core.geometry import LayerOp
from ..deltas import Factor, Kron
from ..deltas.base import Scalar
from ..primitives.kron import kron_merge
from ._run import branch, kernels_for, layer_op, promoted
from .general import factorization

Factors = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def weight_gen(
    org_weight: Tensor,
    rank: int,
    tucker: bool = True,
    factor: int = -1,
    decompose_both: bool = False,
    full_matrix: bool = False,
    unbalanced_factorization: bool = False,
) -> Factors:
    """Fresh (w1, w1a, w1b, w2, w2a, w2b, t2), None where a factor is held the other way; the delta starts at zero.

    A factor stays whole where ``rank`` reaches half of its larger side, w1 also without ``decompose_both``, and both
    with ``full_matrix``. ``unbalanced_factorization`` gives the larger part of out to w1.
    """
    out, inp, *kernel = org_weight.shape
    in_m, in_n = factorization(inp, factor)
    out_l, out_k = factorization(out, factor)
    if unbalanced_factorization:
        out_l, out_k = out_k, out_l
    split_w1 = decompose_both and not full_matrix and rank < max(out_l, in_m) / 2
    split_w2 = not full_matrix and rank < max(out_k, in_n) / 2
    w1 = w1a = w1b = w2 = w2a = w2b = t2 = None
    # Drawn core first, then w2, then w1: the order of the LyCORIS generator, so one seed gives one start.
    if not split_w2:
        w2 = torch.zeros(out_k, in_n, *kernel)
    elif tucker and any(size != 1 for size in kernel):
        t2, w2a, w2b = _kaiming(rank, rank, *kernel), _kaiming(rank, out_k), torch.zeros(rank, in_n)
    else:
        w2a, w2b = _kaiming(out_k, rank), torch.zeros(rank, in_n, *kernel)
    if split_w1:
        w1a, w1b = _kaiming(out_l, rank), _kaiming(rank, in_m)
    else:
        w1 = _kaiming(out_l, in_m)
    return w1, w1a, w1b, w2, w2a, w2b, t2


def _kaiming(*shape: int) -> Tensor:
    return nn.init.kaiming_uniform_(torch.empty(shape), a=math.sqrt(5))


def make_kron(w1: Tensor, w2: Tensor, scale: Scalar) -> Tensor:
    """scale * w1 (x) w2: w1 (l, m), w2 (k, n, *window) -> (l k, m n, *window)."""
    return kron_merge(None, w1, w2, scale).to(promoted(w1, w2))


def kron_weight(
    w1: Tensor | None,
    w1a: Tensor | None,
    w1b: Tensor | None,
    w2: Tensor | None,
    w2a: Tensor | None,
    w2b: Tensor | None,
    t: Tensor | None = None,
    scale: Scalar = 1.0,
    backend: str | None = None,
) -> Tensor:
    """dW (out, in, *k) with ``scale`` as the whole scale, in the factors' dtype."""
    delta, op = _delta((w1, w1a, w1b, w2, w2a, w2b, t), None)
    like = w1 if w1 is not None else w1a
    assert like is not None
    kernels = kernels_for(("kron_merge",), op, like, backend)
    dense = kernels.kron_merge(None, delta.w1.build(), delta.w2.build(op.kernel), scale)
    return dense.to(promoted(w1, w1a, w1b, w2, w2a, w2b, t))


def kron_bypass(
    h: Tensor,
    w1: Tensor | None,
    w1a: Tensor | None,
    w1b: Tensor | None,
    w2: Tensor | None,
    w2a: Tensor | None,
    w2b: Tensor | None,
    t: Tensor | None = None,
    scale: Scalar = 1.0,
    extra_args: Mapping[str, Any] | None = None,
    backend: str | None = None,
) -> Tensor:
    """dW h without forming dW, ``scale`` being the whole scale. A grouped convolution takes the dense delta."""
    delta, op = _delta((w1, w1a, w1b, w2, w2a, w2b, t), extra_args)
    return branch(delta, h, op, scale, () if op.is_conv else ("kron_apply",), backend)


def diff_weight(*weights: Tensor | None, gamma: Scalar = 1.0, backend: str | None = None) -> Tensor:
    """dW from (w1, w1a, w1b, w2, w2a, w2b, t2). ``gamma`` is alpha: the scale is gamma / rank, or 1 with both whole."""
    w1, w1a, w1b, w2, w2a, w2b, t = _seven(weights)
    return kron_weight(w1, w1a, w1b, w2, w2a, w2b, t, _scale(w1b, w2b, gamma), backend)


def bypass_forward_diff(
    h: Tensor,
    org_out: Tensor | None,
    *weights: Tensor | None,
    gamma: Scalar = 1.0,
    extra_args: Mapping[str, Any] | None = None,
    backend: str | None = None,
) -> Tensor:
    """dW h with :func:`diff_weight`'s scale. ``org_out`` is not used."""
    w1, w1a, w1b, w2, w2a, w2b, t = _seven(weights)
    return kron_bypass(h, w1, w1a, w1b, w2, w2a, w2b, t, _scale(w1b, w2b, gamma), extra_args, backend)


def _seven(weights: tuple[Tensor | None, ...]) -> Factors:
    w1, w1a, w1b, w2, w2a, w2b, *core = weights
    return w1, w1a, w1b, w2, w2a, w2b, core[0] if core else None


def _scale(w1b: Tensor | None, w2b: Tensor | None, gamma: Scalar) -> Scalar:
    if w1b is not None:
        return gamma / w1b.shape[0]
    return 1.0 if w2b is None else gamma / w2b.shape[0]


def _delta(weights: Factors, options: Mapping[str, Any] | None) -> tuple[Kron, LayerOp]:
    w1, w1a, w1b, w2, w2a, w2b, t = weights
    left = Factor(full=w1) if w1 is not None else Factor(up=w1a, down=w1b)
    if w2 is not None:
        kernel, right = w2.shape[2:], Factor(full=w2)
    else:
        assert w2a is not None
        assert w2b is not None
        kernel = (w2b if t is None else t).shape[2:]
        right = Factor(up=w2a if t is None else w2a.t(), down=w2b.flatten(1), mid=t)
    (out_l, in_m), (out_k, in_n) = left.shape(), right.shape(tuple(kernel))
    return Kron(left, right, 1.0), layer_op((out_l * out_k, in_m * in_n, *kernel), options)
