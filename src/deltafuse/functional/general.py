"""Factorizations, Tucker products, scaled sums and DoRA's rescale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ..core.errors import ShapeError
from ..core.factorize import factorization, power2factorization
from ..core.geometry import LayerOp
from ..core.precision import accumulate_dtype
from ..deltas.base import Scalar
from ._run import kernels_for, promoted

FUNC_LIST: list[Callable[..., Any] | None] = [None, None, F.linear, F.conv1d, F.conv2d, F.conv3d]
"""The operation of a layer, by the number of dimensions of its weight."""


def rebuild_tucker(t: Tensor, wa: Tensor, wb: Tensor) -> Tensor:
    """t (i, j, *k), wa (i, p), wb (j, r) -> (p, r, *k)."""
    return _tucker(wa.transpose(0, 1), t, wb)


def tucker_weight(wa: Tensor, wb: Tensor, t: Tensor) -> Tensor:
    """:func:`rebuild_tucker` with the core last: wa (i, p), wb (j, r), t (i, j, *k) -> (p, r, *k)."""
    return rebuild_tucker(t, wa, wb)


def tucker_weight_from_conv(up: Tensor, down: Tensor, mid: Tensor) -> Tensor:
    """Three convolution weights as one: up (o, p, 1...), mid (p, q, *k), down (q, i, 1...) -> (o, i, *k)."""
    return _tucker(up.flatten(1), mid, down.flatten(1))


def _tucker(up: Tensor, mid: Tensor, down: Tensor) -> Tensor:
    kernels = kernels_for(("tucker_merge",), _flat_op(up), up, None)
    return kernels.tucker_merge(up, mid, down).to(promoted(up, mid, down))


def add_scaled(base: Tensor, delta: Tensor, gamma: Scalar = 1.0, backend: str | None = None) -> Tensor:
    """base + gamma * delta, summed in float32 or better and rounded once."""
    op = _flat_op(base)
    return kernels_for(("scaled_add",), op, base, backend).scaled_add(base, delta, gamma).to(promoted(base, delta))


def weight_decompose(
    weight: Tensor,
    dora_scale: Tensor,
    multiplier: Scalar = 1,
    wd_on_out: bool = True,
    backend: str | None = None,
) -> Tensor:
    """DoRA on a merged weight M: M * (multiplier * (dora_scale / |M| - 1) + 1), in ``dora_scale``'s dtype.

    |M| is per output row (``wd_on_out``; dora_scale (out, 1...)) or per input column (dora_scale (1, in, 1...)); norm
    and gain are float32 or better, and gradients flow through the norm. The strength acts on the rescale alone: a delta
    already in M stays.
    """
    gain = _dora_gain(weight, dora_scale, 0 if wd_on_out else 1, backend)
    wide = weight.to(gain.dtype)
    return (wide * (1 + multiplier * (gain - 1))).to(dora_scale.dtype)


def apply_dora_scale(org_weight: Tensor, rebuild: Tensor, dora_scale: Tensor, scale: Scalar) -> Tensor:
    """The older DoRA form: W + scale * (g (W + dW) - W) with g = dora_scale / |W + dW| per input column."""
    work = accumulate_dtype(org_weight, rebuild, dora_scale)
    base, delta = org_weight.to(work), rebuild.to(work)
    gain = _dora_gain(base + delta, dora_scale, 1, None)
    change = (gain - 1) * base + gain * delta
    return (base + change * scale).to(promoted(org_weight, dora_scale))


def _dora_gain(weight: Tensor, dora_scale: Tensor, axis: int, backend: str | None) -> Tensor:
    """dora_scale / |weight| shaped to broadcast against ``weight``, float32 or better."""
    if dora_scale.numel() not in (1, weight.shape[axis]):
        side = "output row" if axis == 0 else "input column"
        raise ShapeError(
            f"dora_scale {tuple(dora_scale.shape)} does not fit a weight {tuple(weight.shape)}: "
            f"one value per {side} is {weight.shape[axis]}"
        )
    work = accumulate_dtype(weight, dora_scale)
    kernels = kernels_for(("weight_norm",), _flat_op(weight), weight, backend)
    norm = kernels.weight_norm(weight.to(work), axis)
    gain = dora_scale.to(norm.device, work).reshape(-1) / norm
    shape = [1] * weight.dim()
    shape[axis] = -1
    return gain.view(shape)


def _flat_op(weight: Tensor) -> LayerOp:
    """The weight as a matrix, which is all an elementwise operation needs to know."""
    rows = weight.shape[0] if weight.dim() else 1
    return LayerOp(rows, weight.numel() // max(1, rows))


__all__ = [
    "FUNC_LIST",
    "add_scaled",
    "apply_dora_scale",
    "factorization",
    "power2factorization",
    "rebuild_tucker",
    "tucker_weight",
    "tucker_weight_from_conv",
    "weight_decompose",
]
