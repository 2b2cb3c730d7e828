"""Norms of a weight along one axis, dense or composed from factors.

weight_norm: |M| over all axes but ``axis`` -> (axis size,), float32 or better.
norm_compose: |W + up down| per row or column from W, the factors and their Gram matrices, with no N x K temporary.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..core.precision import accumulate_dtype
from .registry import primitive

_CHUNK_BYTES = 8 << 20


def _root(squares: Tensor) -> Tensor:
    """sqrt with a floor that keeps zero rows at a finite gradient and changes no other row."""
    return squares.clamp(min=torch.finfo(squares.dtype).tiny).sqrt()


def _squares(weight: Tensor, axis: int, work: torch.dtype) -> Tensor:
    """Sums of squares of a 2-D weight per row (axis 0) or column (axis 1), accumulated wide in one pass.

    One expression for frozen and differentiated weights alike: a magnitude taken from W and the norm of W + 0 must
    agree to the last bit.
    """
    return torch.linalg.vector_norm(weight, dim=1 - axis, dtype=work).square()


def _split(factor: Tensor, dtype: torch.dtype) -> Tensor:
    """A float32 matrix as two 16-bit ones side by side, high and low parts, whose sum keeps 16 bits of mantissa."""
    high = factor.to(dtype)
    return torch.cat([high, (factor - high.to(factor.dtype)).to(dtype)], 1)


def _wide_product(weight: Tensor, factor: Tensor) -> Tensor:
    """weight (a, b) in 16 bits times factor (b, r) in float32 -> (a, r) float32, with no float32 copy of weight.

    On CUDA one 16-bit product with float32 output over the factor's two halves; elsewhere a chunk of rows at a time.
    """
    rank = factor.shape[1]
    if weight.is_cuda and weight.dtype == torch.bfloat16 and _has_wide_output():
        both = torch.mm(weight, _split(factor, weight.dtype), out_dtype=torch.float32)
        return both[:, :rank] + both[:, rank:]
    rows = max(1, _CHUNK_BYTES // max(1, 4 * weight.shape[1]))
    return torch.cat([piece.to(factor.dtype) @ factor for piece in weight.split(rows)])


@lru_cache(maxsize=1)
def _has_wide_output() -> bool:
    """Whether torch.mm can write float32 from 16-bit operands."""
    return "out_dtype" in str(torch.ops.aten.mm.dtype._schema) if hasattr(torch.ops.aten.mm, "dtype") else False


class _Project(torch.autograd.Function):
    """W F (W (a, b) 16-bit and frozen, F (b, r) float32) in float32, without keeping a float32 W."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return _wide_product(weight, factor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        (grad,) = grads
        (weight,) = ctx.saved_tensors
        return None, _wide_product(weight.t(), grad.contiguous())


def _project(weight: Tensor, factor: Tensor) -> Tensor:
    if weight.dtype != factor.dtype and not weight.requires_grad and not torch.compiler.is_compiling():
        return _Project.apply(weight, factor)
    return weight.to(factor.dtype) @ factor


@primitive("|M| over all axes but one")
def weight_norm(weight: Tensor, axis: int) -> Tensor:
    """See the module's formula."""
    work = accumulate_dtype(weight)
    if axis == 1 and weight.dim() > 2:
        weight = weight.transpose(0, 1)
        axis = 0
    return _root(_squares(weight.flatten(1), axis, work))


@primitive("|W + up down| per row or column, from the factors")
def norm_compose(weight: Tensor, up: Tensor, down: Tensor, axis: int) -> Tensor:
    """weight (N, K), up (N, r) with every scale folded in, down (r, K) -> (N,) for axis 0, (K,) for axis 1.

    axis 0: |W_i|^2 + 2 <(W A^T)_i, B_i> + B_i (A A^T) B_i^T; axis 1 the same with the roles of the factors swapped.
    """
    work = accumulate_dtype(weight, up, down)
    up, down = up.to(work), down.to(work)
    near, far = (up, down) if axis == 0 else (down.t(), up.t())
    cross = _project(weight if axis == 0 else weight.t(), far.t())
    gram = far @ far.t()
    squares = _squares(weight, axis, work) + 2 * (cross * near).sum(1) + ((near @ gram) * near).sum(1)
    return _root(squares)
