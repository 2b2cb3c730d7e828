"""GLoRA: a linear layer with a low-rank path before it and one beside it, run as a single path of rank r1 + r2.

y = W (x + s A1 A2 x) + s B1 B2 x + bias = W x + s [W A1 | B1] [A2; B2] x + bias

Forward, two launches: one pass over x and W for h, up and down (:mod:`..kernels.glora`); y = x W^T + s h up^T + bias as
one product with an epilogue. Backward, four: one pass over dY (q = s dY up and the parts of dup); dX = dY W + q down as
one product with an epilogue; one pass over x and the parts (dA2, dB2, dB1, S); one pass over W (dA1 = W^T S).
Saved: x, h and the stacked factors up and down.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ....core.precision import compute_dtype
from ....primitives.two_sided import glora_linear as reference
from ..binding import Fused, bind
from ..kernels import glora as kernels
from ..kernels import passes
from ..launch import MAX_KERNEL_RANK, rank_dtype
from ..products import with_lowrank
from . import common

SCHEMA = "Tensor x, Tensor weight, Tensor? bias, Tensor a_up, Tensor a_down, Tensor b_up, Tensor b_down, float alpha"
SAVED = (
    "Tensor x, Tensor weight, Tensor? bias, Tensor a_up, Tensor a_down, Tensor b_up, Tensor b_down, Tensor h, "
    "Tensor up, Tensor down, float alpha"
)


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, a_up: Tensor, a_down: Tensor, b_up: Tensor, b_down: Tensor,
    alpha: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(y (..., N), h (M, r), up (N, r), down (r, K)) with r = r1 + r2."""
    flat = common.flat(x)
    made = kernels.prepare(flat, weight, a_up, a_down, b_up, b_down)
    y = with_lowrank(flat, weight, made.h, made.up, alpha, bias=bias)
    return y.view(*x.shape[:-1], weight.shape[0]), made.h, made.up, made.down


def fake(
    x: Tensor, weight: Tensor, bias: Any, a_up: Tensor, a_down: Tensor, b_up: Tensor, b_down: Tensor, alpha: float
) -> tuple[Tensor, ...]:
    wide, inner = weight.shape
    rank, work = a_down.shape[0] + b_down.shape[0], rank_dtype(x.dtype)
    shapes = (x.numel() // x.shape[-1], rank), (wide, rank), (rank, inner)
    return x.new_empty((*x.shape[:-1], wide)), *(x.new_empty(shape, dtype=work) for shape in shapes)


def save(args: Sequence[Any], outputs: Sequence[Tensor]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    *tensors, alpha = args
    return (*tensors, *outputs[1:]), (alpha,)


def backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, a_up: Tensor, a_down: Tensor, b_up: Tensor,
    b_down: Tensor, h: Tensor, up: Tensor, down: Tensor, alpha: float, needs: Sequence[bool],
) -> tuple[Any, ...]:  # fmt: skip
    """Gradients of x, bias and the four factors, in the order of the arguments."""
    flat, dy = common.flat(x), common.flat(grad)
    _, _, _, want_a_up, want_a_down, want_b_up, want_b_down, _ = needs
    want_down, want_up = want_a_down or want_b_down, want_a_up or want_b_up
    parts = passes.grad(dy, None, h, up, None, None, None, alpha, needs[0] or want_down, want_up)
    dx = with_lowrank(dy, weight, parts.q, down, 1.0, transposed=True).view(x.shape) if needs[0] else None
    da_down, db_down, db_up, s = kernels.factor_grads(parts, flat, a_down, b_up, b_down, alpha, want_down)
    da_up = kernels.prologue_grad(s, weight, a_up) if want_a_up and s is not None else None
    dbias = common.bias_grad(dy, bias, needs[2])
    found = (dx, None, dbias, da_up, da_down, db_up, db_down, None)
    return tuple(item if need else None for item, need in zip(found, needs, strict=True))


def backward_fake(grad: Tensor, *rest: Any) -> tuple[Any, ...]:
    x, _, bias, a_up, a_down, b_up, b_down, *_, needs = rest
    leaves = (x, None, bias, a_up, a_down, b_up, b_down, None)
    return common.empty_grads(leaves, needs)


_run = bind(Fused("glora_linear", SCHEMA, 4, forward, fake, save, SAVED, backward, backward_fake))


def glora_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, a_up: Tensor, a_down: Tensor, b_up: Tensor, b_down: Tensor,
    alpha: float = 1.0,
) -> Tensor:  # fmt: skip
    """The primitive of the same name; a trained weight, or ranks beyond the kernels', run the reference."""
    ranks = a_down.shape[0], b_down.shape[0]
    if weight.requires_grad or 0 in ranks or sum(ranks) > MAX_KERNEL_RANK:
        return reference(x, weight, bias, a_up, a_down, b_up, b_down, alpha)
    work = compute_dtype(x)
    return _run(x.to(work), weight.to(work), bias, a_up, a_down, b_up, b_down, float(alpha))
