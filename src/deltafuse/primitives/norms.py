"""Norms of a weight along one axis, dense or composed from factors.

weight_norm: |M| over all axes but ``axis`` -> (axis size,), float32 or better.
norm_compose: |W + up down| per row or column from W, the factors and their Gram matrices, with no N x K temporary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.precision import accumulate_dtype
from .registry import primitive

_CHUNK_BYTES = 8 << 20


def _root(squares: Tensor) -> Tensor:
    """sqrt with a floor that keeps zero rows at a finite gradient and changes no other row."""
    return squares.clamp(min=torch.finfo(squares.dtype).tiny).sqrt()


def _chunks(weight: Tensor) -> int:
    """Rows at a time such that the float32 copy of a chunk stays small."""
    return max(1, _CHUNK_BYTES // max(1, 4 * weight[:1].numel()))


def _squares(weight: Tensor, axis: int, work: torch.dtype) -> Tensor:
    """Sums of squares of a 2-D weight per row (axis 0) or column (axis 1), a chunk of rows at a time."""
    if weight.dtype == work:
        return weight.square().sum(1 - axis)
    parts = [piece.to(work).square().sum(1 - axis) for piece in weight.split(_chunks(weight))]
    return torch.cat(parts) if axis == 0 else torch.stack(parts).sum(0)


class _Project(torch.autograd.Function):
    """W F^T (axis 0) or W^T F (axis 1) in float32 for a frozen 16-bit W, without keeping a float32 W."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, factor: Tensor, axis: int) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.axis = axis
        pieces = weight.split(_chunks(weight))
        if axis == 0:
            return torch.cat([piece.to(factor.dtype) @ factor.t() for piece in pieces])
        rows = factor.split([piece.shape[0] for piece in pieces])
        return torch.stack([piece.to(factor.dtype).t() @ row for piece, row in zip(pieces, rows, strict=True)]).sum(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None]:
        (grad,) = grads
        (weight,) = ctx.saved_tensors
        pieces = weight.split(_chunks(weight))
        if ctx.axis == 0:
            parts = grad.split([piece.shape[0] for piece in pieces])
            both = zip(parts, pieces, strict=True)
            return None, torch.stack([part.t() @ piece.to(grad.dtype) for part, piece in both]).sum(0), None
        return None, torch.cat([piece.to(grad.dtype) @ grad for piece in pieces]), None


def _project(weight: Tensor, factor: Tensor, axis: int) -> Tensor:
    if weight.dtype != factor.dtype and not weight.requires_grad:
        return _Project.apply(weight, factor, axis)
    wide = weight.to(factor.dtype)
    return wide @ factor.t() if axis == 0 else wide.t() @ factor


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
    cross = _project(weight, far if axis == 0 else up, axis)
    gram = far @ far.t()
    squares = _squares(weight, axis, work) + 2 * (cross * near).sum(1) + ((near @ gram) * near).sum(1)
    return _root(squares)
