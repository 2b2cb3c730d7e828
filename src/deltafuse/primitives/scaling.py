"""Elementwise primitives: channel_scale x (1 + m w), scaled_add W + g D."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..core.precision import accumulate_dtype
from .registry import primitive


@primitive("x times a per-channel vector")
def channel_scale(x: Tensor, vector: Tensor) -> Tensor:
    """vector broadcasts against x; computed in float32 or better, returned in x's dtype."""
    work = accumulate_dtype(x, vector)
    return (x * vector.to(work)).to(x.dtype)


@primitive("W + g D")
def scaled_add(weight: Tensor, delta: Tensor, gain: Any) -> Tensor:
    """Computed in float32 or better and left there; the caller rounds once."""
    work = accumulate_dtype(weight, delta)
    return weight.to(work) + delta.to(work) * gain
