"""Norms of a weight along one axis, dense or composed from factors, and the DoRA gain over a composed one.

weight_norm: |M| over all axes but ``axis`` -> (axis size,), float32 or better.
norm_compose: |W + up down| per row or column from W, the factors and their Gram matrices, with no N x K temporary.
decomposition_gain: magnitude / |W + alpha up down| per row or column.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..core.precision import accumulate_dtype
from .examples import Draw, Sizes, example, floor
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


@primitive("magnitude / |W + alpha up down| per row or column")
def decomposition_gain(weight: Tensor, up: Tensor, down: Tensor, alpha: float, magnitude: Tensor, axis: int) -> Tensor:
    """weight (N, K), up (N, r), down (r, K), magnitude of N (axis 0) or K (axis 1) elements in any shape -> gain."""
    work = accumulate_dtype(weight, up, down, magnitude)
    norm = norm_compose(weight, up.to(work) if alpha == 1 else up.to(work) * alpha, down, axis)
    return magnitude.to(work).reshape(-1) / norm


# -- examples ---------------------------------------------------------------------------------------------------------


def _composed(sizes: Sizes, draw: Draw) -> tuple[Tensor, Tensor, Tensor]:
    up, down = draw.factor(sizes.out, sizes.rank), draw.factor(sizes.rank, sizes.inner, scale=sizes.inner**-0.5)
    return draw.weight(sizes.out, sizes.inner), up, down


@example("decomposition_gain", "rows")
def _gain_rows(sizes: Sizes, draw: Draw) -> tuple[Any, ...]:
    return *_composed(sizes, draw), 0.7, draw.positive(sizes.out), 0


@example("decomposition_gain", "columns")
def _gain_columns(sizes: Sizes, draw: Draw) -> tuple[Any, ...]:
    return *_composed(sizes, draw), -1.3, draw.positive(1, sizes.inner), 1


@example("decomposition_gain", "rows, no gradient through the norm")
def _gain_detached(sizes: Sizes, draw: Draw) -> tuple[Any, ...]:
    weight, up, down = _composed(sizes, draw)
    return weight, up.detach(), down.detach(), 0.7, draw.factor(sizes.out, 1, scale=1.0), 0


@example("norm_compose", "rows")
def _compose_rows(sizes: Sizes, draw: Draw) -> tuple[Any, ...]:
    return *_composed(sizes, draw), 0


@example("norm_compose", "columns")
def _compose_columns(sizes: Sizes, draw: Draw) -> tuple[Any, ...]:
    return *_composed(sizes, draw), 1


@example("weight_norm", "rows")
def _norm_rows(sizes: Sizes, draw: Draw) -> tuple[Any, ...]:
    return draw.data(sizes.out, sizes.inner), 0


@example("weight_norm", "columns")
def _norm_columns(sizes: Sizes, draw: Draw) -> tuple[Any, ...]:
    return draw.data(sizes.out, sizes.inner), 1


@example("weight_norm", "convolution, output channels")
def _norm_conv_rows(sizes: Sizes, draw: Draw) -> tuple[Any, ...]:
    return draw.data(sizes.out, sizes.inner, 3, 3), 0


@example("weight_norm", "convolution, input channels")
def _norm_conv_columns(sizes: Sizes, draw: Draw) -> tuple[Any, ...]:
    return draw.data(sizes.out, sizes.inner, 3, 2), 1


def _passes(sizes: Sizes, width: int) -> tuple[float, float]:
    """W in, forward and backward; factors and their gradients; the rank's products four times."""
    moved = 2 * width * sizes.out * sizes.inner + 16 * sizes.rank * (sizes.out + sizes.inner)
    return float(moved), float(8 * sizes.out * sizes.inner * sizes.rank)


floor("decomposition_gain")(_passes)
floor("norm_compose")(_passes)
