"""LoRA / LoCon: dW = gamma * up down, with a Tucker core gamma * sum_pq up[o, p] mid[p, q, k] down[q, i].

Shapes: down (r, in[, *k]), up (out, r[, 1...]), mid (r, r, *k) or None; with mid, down is (r, in, 1...).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..core.geometry import LayerOp
from ..deltas import LowRank
from ..deltas.base import Scalar
from ._run import branch, kernels_for, layer_op, promoted


def weight_gen(org_weight: Tensor, rank: int, tucker: bool = True) -> tuple[Tensor, Tensor, Tensor | None]:
    """Fresh (down, up, mid) for a weight (out, in, *k): kaiming, zeros, kaiming; mid for ``tucker`` convolutions."""
    out, inp, *kernel = org_weight.shape
    ones = [1] * len(kernel)
    core = tucker and bool(kernel)
    down = torch.empty(rank, inp, *(ones if core else kernel))
    nn.init.kaiming_uniform_(down, a=math.sqrt(5))
    up = torch.zeros(out, rank, *ones)
    if not core:
        return down, up, None
    mid = torch.empty(rank, rank, *kernel)
    nn.init.kaiming_uniform_(mid, a=math.sqrt(5))
    return down, up, mid


def _delta(down: Tensor, up: Tensor, mid: Tensor | None, options: Mapping[str, Any] | None) -> tuple[LowRank, LayerOp]:
    kernel = (down if mid is None else mid).shape[2:]
    op = layer_op((up.shape[0], down.shape[1], *kernel), options)
    return LowRank(down.flatten(1), up.flatten(1), 1.0, mid), op


def diff_weight(*weights: Tensor | None, gamma: Scalar = 1.0, backend: str | None = None) -> Tensor:
    """dW (out, in, *k) from (down, up, mid), in the factors' dtype; ``gamma`` is the whole scale, alpha / rank."""
    down, up, mid = _three(weights)
    delta, op = _delta(down, up, mid, None)
    name = "lowrank_merge" if mid is None else "tucker_merge"
    kernels = kernels_for((name,), op, up, backend)
    factor = delta.factor(gamma)
    if mid is None:
        pairs = ((factor, delta.down),)
        dense = kernels.lowrank_merge(None, pairs, 1.0, "product", promoted(down, up)).view(op.weight_shape)
    else:
        dense = kernels.tucker_merge(factor, mid, delta.down)
    return dense.to(promoted(down, up, mid))


def bypass_forward_diff(
    x: Tensor,
    org_out: Tensor | None,
    *weights: Tensor | None,
    gamma: Scalar = 1.0,
    extra_args: Mapping[str, Any] | None = None,
    backend: str | None = None,
) -> Tensor:
    """dW x by way of the rank-r space. ``org_out`` is not used; ``extra_args``: stride, padding, dilation, groups."""
    delta, op = _delta(*_three(weights), extra_args)
    names = () if op.is_conv else ("lowrank_down", "lowrank_up")
    return branch(delta, x, op, gamma, names, backend)


def _three(weights: tuple[Tensor | None, ...]) -> tuple[Tensor, Tensor, Tensor | None]:
    down, up, *rest = weights
    assert down is not None
    assert up is not None
    return down, up, rest[0] if rest else None
