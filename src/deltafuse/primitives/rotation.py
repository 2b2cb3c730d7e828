"""Rotation primitives: Cayley rotations of blocks and butterfly stages.

cayley_delta: blocks B (..., s, s) -> R - I with Q = B - B^T, R = (I + Q)(I - Q)^-1, solved in float32 or better.
block_rotate: y -> (R - I) applied blockwise to one axis of y.
butterfly: y -> (R_m .. R_1 - I) y with interpolation inside each stage.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.precision import accumulate_dtype
from .gemm import plain_math
from .registry import primitive


@primitive("R - I of Cayley rotations, with an optional norm bound on Q")
def cayley_delta(blocks: Tensor, bound: float) -> Tensor:
    """R - I = 2 (I - Q)^-1 Q: exact for small Q, where R minus I would cancel.

    ``bound`` > 0 limits the Frobenius norm of all of Q together, differentiably and without a host round trip.
    """
    work = accumulate_dtype(blocks)
    raw = blocks.to(work)
    q = raw - raw.transpose(-1, -2)
    if bound > 0:
        norm = (q.square().sum() + torch.finfo(work).tiny).sqrt()
        q = q * (bound / norm.clamp(min=bound))
    eye = torch.eye(q.shape[-1], dtype=work, device=q.device)
    with plain_math(q):
        solution, _ = torch.linalg.solve_ex(eye - q, 2 * q, check_errors=False)
    return solution


@primitive("(R - I) y on blocks of one axis")
def block_rotate(y: Tensor, delta: Tensor, dim: int, transpose: bool) -> Tensor:
    """y with axis ``dim`` of size blocks * s, delta (blocks, s, s): out_j = sum_i delta[j, i] y_i per block.

    ``transpose`` swaps delta's two axes. The product runs in y's dtype, float32 for float16.
    """
    count, size, _ = delta.shape
    axis = dim % y.dim()
    view = y.unflatten(axis, (count, size)).movedim((axis, axis + 1), (0, 1))
    shape = view.shape
    matrix = delta.transpose(1, 2) if transpose else delta
    with plain_math(y):
        turned = torch.bmm(matrix.to(y.dtype), view.reshape(count, size, -1)).reshape(shape)
    return turned.movedim((0, 1), (axis, axis + 1)).flatten(axis, axis + 1)


@primitive("(R_m .. R_1 - I) y, each stage interpolated towards the identity")
def butterfly(y: Tensor, deltas: Tensor, strength: Any, dim: int) -> Tensor:
    """deltas (m, num, b, b) hold R_i - I. Stage i mixes channels whose distance is 2^i b/2.

    The change is accumulated stage by stage, D <- D + strength (R_i - I)(y + D), in float32 or better, so nothing
    cancels and D is rounded once.
    """
    stages, _, size, _ = deltas.shape
    work = accumulate_dtype(y)
    total: Tensor | None = None
    for stage in range(stages):
        stride = 2**stage * (size // 2)
        now = y if total is None else (y + total).to(y.dtype)
        turned = block_rotate(_pair_up(now, dim, stride), deltas[stage], dim, False)
        step = _pair_down(turned, dim, stride).to(work) * strength
        total = step if total is None else total + step
    assert total is not None
    return total.to(y.dtype)


def _pair_up(y: Tensor, dim: int, stride: int) -> Tensor:
    axis = dim % y.dim()
    return y.unflatten(axis, (-1, 2, stride)).transpose(axis + 1, axis + 2).flatten(axis, axis + 2)


def _pair_down(y: Tensor, dim: int, stride: int) -> Tensor:
    axis = dim % y.dim()
    return y.unflatten(axis, (-1, stride, 2)).transpose(axis + 1, axis + 2).flatten(axis, axis + 2)
