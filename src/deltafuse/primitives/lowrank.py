"""Low-rank primitives.

lowrank_down: h = x A^T, x (..., K), A (r, K) -> h (..., r) in float32 for float16 inputs, else in the compute dtype.
lowrank_up: y = h B^T, h (..., r), B (N, r) -> (..., N).
lowrank_merge: [W +] B A, or a Hadamard product of two such; as matrices, float32 or better.
tucker_merge: sum_pq up[o, p] mid[p, q, k] down[q, i] -> (N, I, *k).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.precision import accumulate_dtype, branch_dtype, compute_dtype
from .gemm import product
from .registry import primitive


class _HalfDown(torch.autograd.Function):
    """float16 x against A in float32: keeps the float16 x for the backward pass instead of its float32 copy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, down: Tensor) -> Tensor:
        ctx.save_for_backward(x, down)
        return product(x.float(), down)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (grad,) = grads
        x, down = ctx.saved_tensors
        dx = product(grad, down.t()).to(x.dtype) if ctx.needs_input_grad[0] else None
        rows = grad.reshape(-1, grad.shape[-1])
        da = rows.t() @ x.reshape(-1, x.shape[-1]).float() if ctx.needs_input_grad[1] else None
        return dx, da


@primitive("h = x A^T")
def lowrank_down(x: Tensor, down: Tensor) -> Tensor:
    """See the module's formula."""
    wanted = compute_dtype(x)
    work = branch_dtype(wanted)
    if wanted == torch.float16:
        return _HalfDown.apply(x.to(wanted), down.to(work))
    return product(x.to(work), down.to(work))


@primitive("y = h B^T")
def lowrank_up(h: Tensor, up: Tensor) -> Tensor:
    """See the module's formula."""
    return product(h, up.to(h.dtype))


@primitive("[W +] B A, or (B1 A1) * (B2 A2)")
def lowrank_merge(weight: Tensor | None, pairs: tuple[tuple[Tensor, Tensor], ...], scale: Any) -> Tensor:
    """scale times the elementwise product of up @ down over ``pairs``, added to ``weight`` (N, K) where given."""
    work = accumulate_dtype(weight, *(factor for pair in pairs for factor in pair))
    (up, down), *rest = pairs
    if not rest and weight is not None and isinstance(scale, (int, float)):
        return torch.addmm(weight.to(work), up.to(work), down.to(work), alpha=scale)
    delta = up.to(work) @ down.to(work)
    for other_up, other_down in rest:
        delta = delta * (other_up.to(work) @ other_down.to(work))
    delta = delta * scale
    return delta if weight is None else weight.to(work) + delta


@primitive("Tucker: sum over p, q of up[o, p] mid[p, q, k] down[q, i]")
def tucker_merge(up: Tensor, mid: Tensor, down: Tensor) -> Tensor:
    """up (N, p), mid (p, q, *k), down (q, I) -> (N, I, *k)."""
    work = accumulate_dtype(up, mid, down)
    window = mid.shape[2:]
    core = mid.to(work).flatten(2)
    inner = torch.einsum("pqk,qi->pik", core, down.to(work))
    return torch.einsum("op,pik->oik", up.to(work), inner).unflatten(2, window)
