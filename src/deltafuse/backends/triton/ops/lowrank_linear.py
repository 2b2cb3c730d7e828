"""A linear layer with a low-rank path: LoRA, DyLoRA, T-LoRA, LoHa through its Khatri-Rao factors, DoRA of any of them.

Forward, two launches: h = x A^T; y = gain (x W^T) + up_gain alpha h B^T + bias as one product with an epilogue. With
dropout three: h, the base product, and one pass over y that adds what is kept of the low-rank part.
Backward, three launches: one pass over dY (q, G, the parts of dB); dX = (dY or G) W + q A as one product with an
epilogue; one pass over x (dA and the rest).
Saved: x, h; with a gain also y; with dropout the seed, from which the pass over dY makes the same mask again (above
rank 32 a launch before it does). Nothing else of the layer's size is kept. What dropout divides kept values by is part
of alpha wherever there is a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ....core.precision import compute_dtype
from ....primitives.dropout import checked, keep_scale, threshold
from ....primitives.linear import lowrank_linear as reference
from ..binding import Fused, bind
from ..launch import MAX_KERNEL_RANK, rank_dtype
from ..products import with_lowrank
from . import common

SCHEMA = (
    "Tensor x, Tensor weight, Tensor? bias, Tensor down, Tensor up, float alpha, Tensor? gain, Tensor? up_gain, "
    "Tensor? mask, float dropout, Tensor? seed"
)
SAVED = (
    "Tensor x, Tensor weight, Tensor? bias, Tensor down, Tensor up, Tensor? gain, Tensor? up_gain, Tensor? mask, "
    "Tensor? seed, Tensor h, Tensor? y, float alpha, float dropout"
)


def _masked(alpha: float, dropout: float, seed: Tensor | None) -> tuple[float, tuple[Any, ...]]:
    """alpha with dropout's scale in it, and the mask as the launches take it."""
    return (alpha, ()) if seed is None else (alpha * keep_scale(dropout), (seed, threshold(dropout)))


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, alpha: float,
    gain: Tensor | None, up_gain: Tensor | None, mask: Tensor | None, dropout: float, seed: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(y (..., N), h (M, r))."""
    flat = common.flat(x)
    h = common.passes_for(down, x).down(flat, down, mask)
    alpha, drop = _masked(alpha, dropout, seed)
    y = with_lowrank(flat, weight, h, up, alpha, bias=bias, gain=gain, up_gain=up_gain, drop=drop)
    return y.view(*x.shape[:-1], weight.shape[0]), h


def fake(x: Tensor, weight: Tensor, bias: Any, down: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    rows = x.numel() // x.shape[-1]
    y = x.new_empty((*x.shape[:-1], weight.shape[0]))
    return y, x.new_empty((rows, down.shape[0]), dtype=rank_dtype(x.dtype))


def save(args: Sequence[Any], outputs: Sequence[Tensor]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    x, weight, bias, down, up, alpha, gain, up_gain, mask, dropout, seed = args
    y, h = outputs
    kept = None if gain is None else y
    return (x, weight, bias, down, up, gain, up_gain, mask, seed, h, kept), (alpha, dropout)


def backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, gain: Tensor | None,
    up_gain: Tensor | None, mask: Tensor | None, seed: Tensor | None, h: Tensor, y: Tensor | None, alpha: float,
    dropout: float, needs: Sequence[bool],
) -> tuple[Any, ...]:  # fmt: skip
    """Gradients of x, weight, bias, down, up, gain and up_gain, in the order of the arguments."""
    flat, dy = common.flat(x), common.flat(grad)
    want_q = needs[0] or needs[3]
    runner = common.passes_for(down, x)
    alpha, drop = _masked(alpha, dropout, seed)
    flat_y = None if y is None else common.flat(y)
    parts = runner.grad(dy, flat_y, h, up, gain, up_gain, mask, alpha, want_q, needs[4], *drop)
    scaled = dy if parts.g is None else parts.g
    dx = with_lowrank(scaled, weight, parts.q, down, 1.0, transposed=True).view(x.shape) if needs[0] else None
    grads = runner.finish(parts, flat, down, up, bias, gain, up_gain, alpha, needs[3])
    dweight = scaled.t() @ flat if needs[1] else None
    dbias = common.bias_grad(dy, bias, needs[2])
    dup = grads.up if needs[4] else None
    return dx, dweight, dbias, grads.down, dup, None, grads.gain, grads.up_gain, None, None, None


def backward_fake(grad: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> tuple[Any, ...]:
    bias, down, up, gain, up_gain, *_, needs = rest
    tensors = (x, weight, bias, down, up, None, gain, up_gain, None, None, None)
    return common.empty_grads(tensors, needs)


_run = bind(Fused("lowrank_linear", SCHEMA, 2, forward, fake, save, SAVED, backward, backward_fake))


def lowrank_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, alpha: float = 1.0,
    gain: Tensor | None = None, up_gain: Tensor | None = None, mask: Tensor | None = None, dropout: float = 0.0,
    seed: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The primitive of the same name; a rank beyond the kernels' runs the reference."""
    if down.shape[0] > MAX_KERNEL_RANK or down.shape[0] == 0:
        return reference(x, weight, bias, down, up, alpha, gain, up_gain, mask, dropout, seed)
    work = compute_dtype(x)
    mask = None if mask is None else mask.contiguous()
    dropout, seed = checked(dropout, seed)
    return _run(x.to(work), weight.to(work), bias, down, up, float(alpha), gain, up_gain, mask, dropout, seed)
