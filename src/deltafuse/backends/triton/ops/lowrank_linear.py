"""A linear layer with a low-rank path: LoRA, DyLoRA, T-LoRA, LoHa through its Khatri-Rao factors, DoRA of any of them.

Forward, two launches: h = x A^T; y = gain (x W^T) + up_gain alpha h B^T + bias as one product with an epilogue.
Backward, three launches: one pass over dY (q, G, the parts of dB); dX = (dY or G) W + q A as one product with an
epilogue; one pass over x (dA and the rest).
Saved: x, h; with a gain also y. Nothing else of the layer's size is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ....core.precision import compute_dtype
from ....primitives.linear import lowrank_linear as reference
from ..binding import Fused, bind
from ..kernels import passes, wide
from ..launch import MAX_KERNEL_RANK, rank_dtype
from ..products import with_lowrank

SCHEMA = (
    "Tensor x, Tensor weight, Tensor? bias, Tensor down, Tensor up, float alpha, Tensor? gain, Tensor? up_gain, "
    "Tensor? mask"
)
SAVED = (
    "Tensor x, Tensor weight, Tensor? bias, Tensor down, Tensor up, Tensor? gain, Tensor? up_gain, Tensor? mask, "
    "Tensor h, Tensor? y, float alpha"
)


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _runner(down: Tensor, x: Tensor) -> Any:
    """Whose passes: the kernels' or, at ranks that are products like any other, the library's."""
    return wide if wide.applies(down.shape[0], x.dtype) else passes


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, alpha: float,
    gain: Tensor | None, up_gain: Tensor | None, mask: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(y (..., N), h (M, r))."""
    flat = _flat(x)
    h = _runner(down, x).down(flat, down, mask)
    y = with_lowrank(flat, weight, h, up, alpha, bias=bias, gain=gain, up_gain=up_gain)
    return y.view(*x.shape[:-1], weight.shape[0]), h


def fake(x: Tensor, weight: Tensor, bias: Any, down: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    rows = x.numel() // x.shape[-1]
    y = x.new_empty((*x.shape[:-1], weight.shape[0]))
    return y, x.new_empty((rows, down.shape[0]), dtype=rank_dtype(x.dtype))


def save(args: Sequence[Any], outputs: Sequence[Tensor]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    x, weight, bias, down, up, alpha, gain, up_gain, mask = args
    y, h = outputs
    return (x, weight, bias, down, up, gain, up_gain, mask, h, None if gain is None else y), (alpha,)


def backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, gain: Tensor | None,
    up_gain: Tensor | None, mask: Tensor | None, h: Tensor, y: Tensor | None, alpha: float, needs: Sequence[bool],
) -> tuple[Any, ...]:  # fmt: skip
    """Gradients of x, weight, bias, down, up, gain and up_gain, in the order of the arguments."""
    flat, dy = _flat(x), _flat(grad)
    want_q = needs[0] or needs[3]
    runner = _runner(down, x)
    parts = runner.grad(dy, None if y is None else _flat(y), h, up, gain, up_gain, mask, alpha, want_q, needs[4])
    scaled = dy if parts.g is None else parts.g
    dx = with_lowrank(scaled, weight, parts.q, down, 1.0, transposed=True).view(x.shape) if needs[0] else None
    grads = runner.finish(parts, flat, down, up, bias, gain, up_gain, alpha, needs[3])
    dweight = scaled.t() @ flat if needs[1] else None
    dbias = dy.sum(0, dtype=torch.float32).to(bias.dtype) if needs[2] and bias is not None else None
    return dx, dweight, dbias, grads.down, grads.up if needs[4] else None, None, grads.gain, grads.up_gain, None


def backward_fake(grad: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> tuple[Any, ...]:
    bias, down, up, gain, up_gain, *_, needs = rest
    tensors = (x, weight, bias, down, up, None, gain, up_gain, None)
    return tuple(
        None if tensor is None or not need else tensor.new_empty(tensor.shape)
        for tensor, need in zip(tensors, needs, strict=True)
    )


_run = bind(Fused("lowrank_linear", SCHEMA, 2, forward, fake, save, SAVED, backward, backward_fake))


def lowrank_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, alpha: float = 1.0,
    gain: Tensor | None = None, up_gain: Tensor | None = None, mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The primitive of the same name; a rank beyond the kernels' runs the reference."""
    if down.shape[0] > MAX_KERNEL_RANK or down.shape[0] == 0:
        return reference(x, weight, bias, down, up, alpha, gain, up_gain, mask)
    work = compute_dtype(x)
    mask = None if mask is None else mask.contiguous()
    return _run(x.to(work), weight.to(work), bias, down, up, float(alpha), gain, up_gain, mask)
