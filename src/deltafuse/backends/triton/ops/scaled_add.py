"""The sum W + s D, rounded once: merged weights of dense differences.

Forward, one launch: W and D read and the sum written once. Backward, one launch: the sum's gradient read and D's
written once, or none where both are the same. Saved: nothing, or s and D where s is a tensor.

A traced graph sees the reference: two elementwise operations that the compiler fuses with their neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ....core.precision import accumulate_dtype
from ....primitives.scaling import scaled_add as reference
from ..binding import Fused, bind
from ..kernels import scale as passes

SCHEMA = "Tensor weight, Tensor delta, float gain, Tensor? gain_tensor, ScalarType out_dtype"
SAVED = "Tensor? delta, Tensor? gain_tensor, float gain, ScalarType dtype"
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def forward(
    weight: Tensor, delta: Tensor, gain: float, gain_tensor: Tensor | None, out_dtype: torch.dtype
) -> tuple[Tensor]:
    """(W + s D,)."""
    return (passes.add(weight, delta, gain if gain_tensor is None else gain_tensor, out_dtype),)


def fake(weight: Tensor, delta: Tensor, gain: float, gain_tensor: Any, out_dtype: torch.dtype) -> tuple[Tensor]:
    return (weight.new_empty(weight.shape, dtype=out_dtype),)


def save(args: Sequence[Any], outputs: Sequence[Tensor]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    _, delta, gain, gain_tensor, _ = args
    return (None if gain_tensor is None else delta, gain_tensor), (gain, delta.dtype)


def backward(
    grad: Tensor, delta: Tensor | None, gain_tensor: Tensor | None, gain: float, dtype: torch.dtype,
    needs: Sequence[bool],
) -> tuple[Any, ...]:  # fmt: skip
    """Gradients of D and of s, in the order of the arguments."""
    if not (needs[1] or needs[3]):
        return (None,) * 5
    number = gain if gain_tensor is None else gain_tensor
    dd, dgain = passes.add_grad(grad.contiguous(), delta, number, dtype, needs[1], needs[3])
    return None, dd, None, dgain, None


def backward_fake(
    grad: Tensor, delta: Any, gain_tensor: Tensor | None, gain: float, dtype: torch.dtype, needs: Sequence[bool]
) -> tuple[Any, ...]:
    dd = grad.new_empty(grad.shape, dtype=dtype) if needs[1] else None
    return (
        None,
        dd,
        None,
        gain_tensor.new_empty(gain_tensor.shape) if needs[3] and gain_tensor is not None else None,
        None,
    )


_run = bind(Fused("scaled_add", SCHEMA, 1, forward, fake, save, SAVED, backward, backward_fake))
_plain = bind(Fused("plain_add", SCHEMA, 1, forward, fake, save, SAVED, backward, backward_fake, through=1))
"""With s = 1 and a sum of D's dtype: D's gradient is the sum's."""


def scaled_add(weight: Tensor, delta: Tensor, gain: Any, out_dtype: torch.dtype | None = None) -> Tensor:
    """The primitive of the same name; what is not a frozen W and a D of its shape, both dense, runs the reference."""
    if torch.compiler.is_compiling() or not _takes(weight, delta, gain, out_dtype):
        return reference(weight, delta, gain, out_dtype)
    if isinstance(gain, Tensor):
        return _run(weight, delta, 1.0, gain, out_dtype or accumulate_dtype(weight, delta))
    same = weight.dtype == delta.dtype
    out_dtype = out_dtype or (weight.dtype if same else accumulate_dtype(weight, delta))
    run = _plain if gain == 1 and out_dtype == delta.dtype else _run
    return run(weight, delta, float(gain), None, out_dtype)


def _takes(weight: Tensor, delta: Tensor, gain: Any, out_dtype: torch.dtype | None) -> bool:
    """Whether the kernels run these arguments."""
    if isinstance(gain, Tensor) and (gain.numel() != 1 or gain.device != weight.device):
        return False
    return (
        not weight.requires_grad
        and weight.shape == delta.shape
        and weight.device == delta.device
        and all(dtype in _FLOATS for dtype in (weight.dtype, delta.dtype, out_dtype or torch.float32))
        and weight.is_contiguous()
        and delta.is_contiguous()
    )
