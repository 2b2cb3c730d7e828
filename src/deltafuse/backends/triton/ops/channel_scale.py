"""A vector times the last axis of x, for what stands alone: y = v x.

Forward, one launch: x read and y written once. Backward, one launch: dY and x read and dx written once, dv beside it.
Saved: x and v.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ....primitives.scaling import channel_scale as reference
from ..binding import Fused, bind
from ..kernels import scale as passes
from . import common

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def forward(x: Tensor, vector: Tensor) -> tuple[Tensor]:
    """(y,) in x's dtype."""
    return (passes.scale(common.flat(x), vector, 1.0, False, None).view(x.shape),)


def fake(x: Tensor, vector: Tensor) -> tuple[Tensor]:
    return (x.new_empty(x.shape),)


def save(args: Sequence[Any], outputs: Sequence[Tensor]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    return tuple(args), ()


def backward(grad: Tensor, x: Tensor, vector: Tensor, needs: Sequence[bool]) -> tuple[Any, ...]:
    """Gradients of x and the vector."""
    dy = common.flat(grad)
    if not needs[1]:
        return passes.scale(dy, vector, 1.0, False, None).view(x.shape), None
    dx, dv = passes.scale_grad(dy, common.flat(x), vector, 1.0, False, needs[0])
    return None if dx is None else dx.view(x.shape), dv


def backward_fake(grad: Tensor, x: Tensor, vector: Tensor, needs: Sequence[bool]) -> tuple[Any, ...]:
    return x.new_empty(x.shape) if needs[0] else None, vector.new_empty(vector.shape) if needs[1] else None


_run = bind(Fused("channel_scale", "Tensor x, Tensor vector", 1, forward, fake, save, "Tensor x, Tensor vector",
                  backward, backward_fake))  # fmt: skip


def channel_scale(x: Tensor, vector: Tensor) -> Tensor:
    """The primitive of the same name; a vector along another axis, or in float64, runs the reference."""
    last = vector.dim() == 1 and x.dim() >= 1 and vector.shape[0] == x.shape[-1]
    if not last or x.dtype not in _FLOATS or vector.dtype not in _FLOATS or x.device != vector.device:
        return reference(x, vector)
    return _run(x, vector)
