"""The sum W + s D, rounded once: merged weights of dense differences.

Forward, one launch: W and D read and the sum written once. Backward, one launch: the sum's gradient read and D's
written once, or none where both are the same. Saved: nothing, or s and D where s wants a gradient.

Bound to eager alone: a traced graph sees the reference, two elementwise operations that the compiler fuses with their
neighbours, and an operator could not hand the incoming gradient on as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ....core.precision import accumulate_dtype
from ....primitives.scaling import scaled_add as reference
from ..kernels import scale as passes

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, delta: Tensor, gain: Any, dtype: torch.dtype) -> Tensor:
        tensor = isinstance(gain, Tensor)
        ctx.gain, ctx.dtype = None if tensor else gain, delta.dtype
        ctx.save_for_backward(gain if tensor else None, delta if tensor and gain.requires_grad else None)
        return passes.add(weight, delta, gain, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        _, want_d, want_gain, _ = ctx.needs_input_grad
        gain, delta = ctx.saved_tensors
        gain = ctx.gain if gain is None else gain
        if not want_gain and grad.dtype == ctx.dtype and not isinstance(gain, Tensor) and gain == 1:
            return None, grad, None, None
        return None, *passes.add_grad(grad.contiguous(), delta, gain, ctx.dtype, want_d, want_gain), None


def scaled_add(weight: Tensor, delta: Tensor, gain: Any, out_dtype: torch.dtype | None = None) -> Tensor:
    """The primitive of the same name; what is not two dense tensors of one shape runs the reference."""
    if torch.compiler.is_compiling() or not _takes(weight, delta, gain):
        return reference(weight, delta, gain, out_dtype)
    if out_dtype is None:
        plain = weight.dtype == delta.dtype and not isinstance(gain, Tensor)
        out_dtype = weight.dtype if plain else accumulate_dtype(weight, delta)
    return _Add.apply(weight, delta, gain if isinstance(gain, Tensor) else float(gain), out_dtype)


def _takes(weight: Tensor, delta: Tensor, gain: Any) -> bool:
    """Whether the kernels run these arguments."""
    if isinstance(gain, Tensor) and (gain.numel() != 1 or gain.device != weight.device):
        return False
    return (
        weight.shape == delta.shape
        and weight.device == delta.device
        and weight.dtype in _FLOATS
        and delta.dtype in _FLOATS
        and not weight.requires_grad
        and weight.is_contiguous()
        and delta.is_contiguous()
    )
