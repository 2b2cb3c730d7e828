"""Elementwise primitives: channel_scale x (1 + m w), scaled_add W + g D."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.precision import accumulate_dtype
from .registry import primitive

_HALVES = (torch.float16, torch.bfloat16)


class _Scale(torch.autograd.Function):
    """A 16-bit x times a float32 vector, multiplied in float32 and written in 16 bits, with no float32 x in memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, vector: Tensor) -> Tensor:
        ctx.save_for_backward(x, vector)
        return torch.mul(x, vector, out=torch.empty_like(x))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (grad,) = grads
        x, vector = ctx.saved_tensors
        dx = torch.mul(grad, vector, out=torch.empty_like(x)) if ctx.needs_input_grad[0] else None
        return dx, _vector_grad(grad, x, vector) if ctx.needs_input_grad[1] else None


def _vector_grad(grad: Tensor, x: Tensor, vector: Tensor) -> Tensor:
    """Sum of grad * x over every axis the vector lacks; float16 terms are widened first, for their range."""
    shape = (1,) * (x.dim() - vector.dim()) + tuple(vector.shape)
    axes = [axis for axis, side in enumerate(shape) if side == 1 and x.shape[axis] != 1]
    terms = grad * x if x.dtype == torch.bfloat16 else grad.to(vector.dtype) * x
    summed = terms.sum(axes, keepdim=True, dtype=vector.dtype) if axes else terms.to(vector.dtype)
    return summed.reshape(vector.shape)


@primitive("x times a per-channel vector")
def channel_scale(x: Tensor, vector: Tensor) -> Tensor:
    """vector broadcasts against x; computed in float32 or better, returned in x's dtype."""
    work = accumulate_dtype(x, vector)
    if x.dtype in _HALVES and work == torch.float32 and not torch.compiler.is_compiling():
        return _Scale.apply(x, vector.to(work))
    return (x * vector.to(work)).to(x.dtype)


@primitive("W + g D")
def scaled_add(weight: Tensor, delta: Tensor, gain: Any) -> Tensor:
    """Computed in float32 or better. Two tensors of one 16-bit dtype are added in one pass and rounded once; anything
    else is left in the accumulation dtype for the caller to round."""
    if weight.dtype == delta.dtype and isinstance(gain, (int, float)):
        return torch.add(weight, delta, alpha=gain)
    work = accumulate_dtype(weight, delta)
    return weight.to(work) + delta.to(work) * gain
