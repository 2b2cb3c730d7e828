"""DoRA on a linear layer: norm, gain, base product, low-rank path and bias as one operation.

Forward, three launches: one pass over W for the norms and gains; h = x A^T; y as one product with an epilogue.
Backward, five: one pass over dY and y (G = dY times the gain, its column sums); one over dY (q, the parts of dB);
dX = G W + q A as one product with an epilogue; one pass over x; one over W for what flows through the norm.
Saved: x, y, h, and vectors and a slope (N, r) in float32. Nothing else of the layer's size is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ....core.precision import compute_dtype
from ....primitives.decomposed import decomposed_linear as reference
from ..binding import Fused, bind
from ..kernels import norms
from ..launch import MAX_KERNEL_RANK, rank_dtype
from ..products import with_lowrank
from . import common

SCHEMA = (
    "Tensor x, Tensor weight, Tensor? bias, Tensor down, Tensor up, float alpha, Tensor magnitude, float strength, "
    "Tensor? scale, bool detach, Tensor? mask"
)
SAVED = (
    "Tensor x, Tensor weight, Tensor? bias, Tensor down, Tensor up, Tensor magnitude, Tensor? scale, Tensor? mask, "
    "Tensor y, Tensor h, Tensor gain, Tensor norm, Tensor slope, float alpha, float strength, bool detach"
)


def _gains(gain: Tensor, strength: float, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """What multiplies W x and what multiplies the low-rank path."""
    if scale is None and strength == 1:
        return gain, gain
    share = strength if scale is None else scale
    branch = gain * share
    return branch + (1 - share), branch


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, alpha: float, magnitude: Tensor,
    strength: float, scale: Tensor | None, detach: bool, mask: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """(y (..., N), h (M, r), gain (N,), norm (N,), slope (N, r))."""
    flat = common.flat(x)
    found = norms.compose(weight, up, down, alpha, magnitude.contiguous(), 0, not detach)
    assert found.gain is not None
    slope = found.norm.new_empty(0) if found.slope is None else found.slope
    kept, branch = _gains(found.gain, strength, scale)
    runner = common.passes_for(down, x)
    h = runner.down(flat, down, mask)
    y = with_lowrank(flat, weight, h, up, alpha, bias=bias, gain=kept, up_gain=branch)
    return y.view(*x.shape[:-1], weight.shape[0]), h, found.gain, found.norm, slope


def fake(x: Tensor, weight: Tensor, bias: Any, down: Tensor, up: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    rank, rows = down.shape[0], x.numel() // x.shape[-1]
    wide_, detach = weight.shape[0], rest[-2]
    return (
        x.new_empty((*x.shape[:-1], wide_)),
        x.new_empty((rows, rank), dtype=rank_dtype(x.dtype)),
        weight.new_empty(wide_, dtype=torch.float32),
        weight.new_empty(wide_, dtype=torch.float32),
        weight.new_empty(0 if detach else (wide_, rank), dtype=torch.float32),
    )


def save(args: Sequence[Any], outputs: Sequence[Tensor]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    x, weight, bias, down, up, alpha, magnitude, strength, scale, detach, mask = args
    return (x, weight, bias, down, up, magnitude, scale, mask, *outputs), (alpha, strength, detach)


def backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, magnitude: Tensor,
    scale: Tensor | None, mask: Tensor | None, y: Tensor, h: Tensor, gain: Tensor, norm: Tensor, slope: Tensor,
    alpha: float, strength: float, detach: bool, needs: Sequence[bool],
) -> tuple[Any, ...]:  # fmt: skip
    """Gradients of x, bias, down, up and magnitude, in the order of the arguments."""
    flat, dy = common.flat(x), common.flat(grad)
    want_down, want_up, want_magnitude = needs[3], needs[4], needs[6]
    kept, branch = _gains(gain, strength, scale)
    runner = common.passes_for(down, x)
    parts = runner.grad(dy, common.flat(y), h, up, kept, branch, mask, alpha, needs[0] or want_down, True)
    assert parts.g is not None
    dx = with_lowrank(parts.g, weight, parts.q, down, 1.0, transposed=True).view(x.shape) if needs[0] else None
    direct = runner.finish(parts, flat, down, up, bias, kept, branch, alpha, want_down)
    dgain = _gain_grad(direct, strength, scale)
    through = norms.compose_backward(
        dgain, weight, up, down, magnitude.contiguous(), norm, None if detach else slope, alpha, 0,
        want_up and not detach, want_down and not detach, want_magnitude,
    )  # fmt: skip
    ddown, dup = _sum(direct.down, through.down), _sum(direct.up, through.up) if want_up else None
    dbias = common.bias_grad(dy, bias, needs[2])
    return dx, None, dbias, ddown, dup, None, through.magnitude, None, None, None, None


def _gain_grad(direct: Any, strength: float, scale: Tensor | None) -> Tensor:
    total: Tensor = direct.gain + direct.up_gain
    if scale is not None:
        return total * scale
    return total if strength == 1 else total * strength


def _sum(direct: Tensor | None, through: Tensor | None) -> Tensor | None:
    return direct if direct is None or through is None else direct.add_(through)


def backward_fake(grad: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> tuple[Any, ...]:
    bias, down, up, magnitude, *_, needs = rest
    leaves = (x, None, bias, down, up, None, magnitude, None, None, None, None)
    return common.empty_grads(leaves, needs)


_run = bind(Fused("decomposed_linear", SCHEMA, 5, forward, fake, save, SAVED, backward, backward_fake))


def decomposed_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, alpha: float, magnitude: Tensor,
    strength: float | Tensor = 1.0, detach: bool = False, mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The primitive of the same name; a trained weight or strength, float64 and ranks beyond the kernels' run the
    reference."""
    doubles = any(item.dtype == torch.float64 for item in (down, up, magnitude))
    trained = weight.requires_grad or (isinstance(strength, Tensor) and strength.requires_grad)
    if doubles or trained or not 0 < down.shape[0] <= MAX_KERNEL_RANK:
        return reference(x, weight, bias, down, up, alpha, magnitude, strength, detach, mask)
    work = compute_dtype(x)
    tensor = isinstance(strength, Tensor)
    number, scale = (1.0, strength.detach()) if tensor else (float(strength), None)  # type: ignore[union-attr]
    return _run(
        x.to(work), weight.to(work), bias, down, up, float(alpha), magnitude, number, scale, detach,
        None if mask is None else mask.contiguous(),
    )  # fmt: skip
