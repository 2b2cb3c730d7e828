"""A linear layer with gains on its input columns and a low-rank path: column DoRA.

Forward, two launches: x' = gain x and h = (down_gain x) A^T in one pass over x; y = x' W^T + alpha h B^T + bias as one
product with an epilogue. Backward, three launches: one pass over dY (q and the parts of dB); T = dY W; one pass over x
and T (dx in T's memory, dA, dB and the gains' gradients).
Saved: x, h. x' is gone after the product.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ....core.precision import compute_dtype
from ....primitives.linear import columns_linear as reference
from ..binding import Fused, bind
from ..kernels import columns
from ..launch import rank_dtype
from ..products import with_lowrank
from . import common

SCHEMA = (
    "Tensor x, Tensor weight, Tensor? bias, Tensor down, Tensor up, float alpha, Tensor gain, Tensor? down_gain, "
    "Tensor? mask"
)
SAVED = (
    "Tensor x, Tensor weight, Tensor? bias, Tensor down, Tensor up, Tensor gain, Tensor? down_gain, Tensor? mask, "
    "Tensor h, float alpha"
)


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, alpha: float, gain: Tensor,
    down_gain: Tensor | None, mask: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(y (..., N), h (M, r))."""
    scaled, h = columns.forward(common.flat(x), gain, down_gain, down, mask)
    y = with_lowrank(scaled, weight, h, up, alpha, bias=bias)
    return y.view(*x.shape[:-1], weight.shape[0]), h


def fake(x: Tensor, weight: Tensor, bias: Any, down: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    rows = x.numel() // x.shape[-1]
    y = x.new_empty((*x.shape[:-1], weight.shape[0]))
    return y, x.new_empty((rows, down.shape[0]), dtype=rank_dtype(x.dtype))


def save(args: Sequence[Any], outputs: Sequence[Tensor]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    x, weight, bias, down, up, alpha, gain, down_gain, mask = args
    return (x, weight, bias, down, up, gain, down_gain, mask, outputs[1]), (alpha,)


def backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, gain: Tensor,
    down_gain: Tensor | None, mask: Tensor | None, h: Tensor, alpha: float, needs: Sequence[bool],
) -> tuple[Any, ...]:  # fmt: skip
    """Gradients of x, weight, bias, down, up, gain and down_gain, in the order of the arguments."""
    flat, dy = common.flat(x), common.flat(grad)
    want_base = needs[0] or needs[6]
    want_x = want_base or needs[3] or needs[7]
    mask = mask if dy.shape[0] > 0 else None
    parts = common.passes_for(down, x).grad(dy, None, h, up, None, None, mask, alpha, want_x, needs[4])
    base = torch.mm(dy, weight) if want_base else None
    grads = columns.backward(parts, flat, base, down, up, gain, down_gain, alpha, want_x, needs[3])
    dx = None if base is None or not needs[0] else base.view(x.shape)
    dweight = (dy.t() @ flat).mul_(gain) if needs[1] else None
    dbias = common.bias_grad(dy, bias, needs[2])
    dgain = grads.gain if needs[6] else None
    return dx, dweight, dbias, grads.down, grads.up, None, dgain, grads.down_gain if needs[7] else None, None


def backward_fake(grad: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> tuple[Any, ...]:
    bias, down, up, gain, down_gain, *_, needs = rest
    tensors = (x, weight, bias, down, up, None, gain, down_gain, None)
    return common.empty_grads(tensors, needs)


_run = bind(Fused("columns_linear", SCHEMA, 2, forward, fake, save, SAVED, backward, backward_fake))


def columns_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, alpha: float, gain: Tensor,
    down_gain: Tensor | None = None, mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The primitive of the same name; a rank beyond the kernels' and float64 gains run the reference."""
    work = compute_dtype(x)
    if not columns.takes(down.shape[0], work) or gain.dtype == torch.float64:
        return reference(x, weight, bias, down, up, alpha, gain, down_gain, mask)
    mask = None if mask is None else mask.contiguous()
    return _run(x.to(work), weight.to(work), bias, down, up, float(alpha), gain, down_gain, mask)
