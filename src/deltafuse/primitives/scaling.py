"""Scales and sums: channel_scale x v, scaled_linear with 1 + m v on a layer's output or input, scaled_add W + g D.

channel_scale: any x, v broadcasts against it. scaled_linear: x (..., K), W (N, K), bias (N,), v (N,) or on the input
(K,) -> (..., N). scaled_add: W and D of one shape, g a number or a 0-d tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.precision import accumulate_dtype
from .examples import Draw, Sizes, example
from .gemm import gemm_epilogue
from .lowrank import rounded
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


@primitive("y = g (x W^T) + bias or y = (g x) W^T + bias, g = 1 + m v")
def scaled_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, vector: Tensor, strength: float = 1.0, on_input: bool = False
) -> Tensor:
    """strength is m, a number. The bias is never scaled."""
    gain = 1 + vector.to(accumulate_dtype(vector)) * strength
    if on_input:
        return gemm_epilogue(channel_scale(x, gain), weight, bias, None, None)
    y = channel_scale(gemm_epilogue(x, weight, None, None, None), gain)
    return y if bias is None else y + bias.to(y.dtype)


@primitive("W + g D")
def scaled_add(weight: Tensor, delta: Tensor, gain: Any, out_dtype: torch.dtype | None = None) -> Tensor:
    """Computed in float32 or better and rounded once to ``out_dtype``. Without one, two tensors of one dtype give that
    dtype, unless the gain is a tensor; anything else is left in the accumulation dtype for the caller to round."""
    if weight.dtype == delta.dtype and isinstance(gain, (int, float)) and out_dtype in (None, weight.dtype):
        return torch.add(weight, delta, alpha=gain)
    work = accumulate_dtype(weight, delta)
    return rounded(weight.to(work) + delta.to(work) * gain, out_dtype)


# -- examples ---------------------------------------------------------------------------------------------------------


@example("channel_scale", "float32 vector")
def _scale(sizes: Sizes, draw: Draw) -> tuple[Any, ...]:
    return draw.data(*sizes.lead, sizes.inner), draw.positive(sizes.inner)


@example("channel_scale", "vector in the layer's dtype")
def _scale_narrow(sizes: Sizes, draw: Draw) -> tuple[Any, ...]:
    return draw.data(*sizes.lead, sizes.inner), draw.data(sizes.inner)


@example("channel_scale", "frozen vector")
def _scale_frozen(sizes: Sizes, draw: Draw) -> tuple[Any, ...]:
    return draw.data(*sizes.lead, sizes.inner), draw.positive(sizes.inner, grad=False)


def _layer(sizes: Sizes, draw: Draw, bias: bool, channels: int, grad: bool = True) -> tuple[Any, ...]:
    x, weight = draw.data(*sizes.lead, sizes.inner), draw.weight(sizes.out, sizes.inner)
    return x, weight, draw.data(sizes.out, grad=False) if bias else None, draw.factor(channels, scale=0.5, grad=grad)


@example("scaled_linear", "output")
def _output(sizes: Sizes, draw: Draw) -> tuple[Any, ...]:
    return *_layer(sizes, draw, False, sizes.out), 0.7, False


@example("scaled_linear", "output, bias")
def _output_bias(sizes: Sizes, draw: Draw) -> tuple[Any, ...]:
    return *_layer(sizes, draw, True, sizes.out), 1.0, False


@example("scaled_linear", "output, frozen vector")
def _output_frozen(sizes: Sizes, draw: Draw) -> tuple[Any, ...]:
    return *_layer(sizes, draw, True, sizes.out, grad=False), 0.7, False


@example("scaled_linear", "input")
def _input(sizes: Sizes, draw: Draw) -> tuple[Any, ...]:
    return *_layer(sizes, draw, False, sizes.inner), 0.7, True


@example("scaled_linear", "input, bias")
def _input_bias(sizes: Sizes, draw: Draw) -> tuple[Any, ...]:
    return *_layer(sizes, draw, True, sizes.inner), -1.5, True


@example("scaled_add", "difference in float32, rounded to the weight's dtype")
def _add_rounded(sizes: Sizes, draw: Draw) -> tuple[Any, ...]:
    return draw.weight(sizes.out, sizes.inner), draw.factor(sizes.out, sizes.inner), 0.7, draw.dtype


@example("scaled_add", "difference in float32")
def _add_wide(sizes: Sizes, draw: Draw) -> tuple[Any, ...]:
    return draw.weight(sizes.out, sizes.inner), draw.factor(sizes.out, sizes.inner), 1.0


@example("scaled_add", "one dtype")
def _add_plain(sizes: Sizes, draw: Draw) -> tuple[Any, ...]:
    return draw.weight(sizes.out, sizes.inner), draw.data(sizes.out, sizes.inner), 1.0


@example("scaled_add", "trained gain")
def _add_gained(sizes: Sizes, draw: Draw) -> tuple[Any, ...]:
    return draw.weight(sizes.out, sizes.inner), draw.factor(sizes.out, sizes.inner), draw.positive()


@example("scaled_add", "frozen gain, rounded")
def _add_frozen_gain(sizes: Sizes, draw: Draw) -> tuple[Any, ...]:
    gain = draw.positive(grad=False)
    return draw.weight(sizes.out, sizes.inner), draw.factor(sizes.out, sizes.inner), gain, draw.dtype
