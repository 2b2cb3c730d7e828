"""W' = W + scale w1 (x) w2: one launch forward, one backward. Saved: the factors (and W where it wants a gradient)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ....primitives.kron import kron_merge as reference
from ....primitives.kron import scaled
from ..binding import Fused, bind
from ..kernels import kron_merge as kernels
from . import common

SCHEMA = "Tensor? weight, Tensor w1, Tensor w2, float scale"


def forward(weight: Tensor | None, w1: Tensor, w2: Tensor, scale: float) -> tuple[Tensor]:
    """(W' (l k, m n),) in float32."""
    return (kernels.merge(weight, w1, w2, scale),)


def fake(weight: Any, w1: Tensor, w2: Tensor, scale: float) -> tuple[Tensor]:
    return (w1.new_empty((w1.shape[0] * w2.shape[0], w1.shape[1] * w2.shape[1]), dtype=torch.float32),)


def save(args: Sequence[Any], outputs: Sequence[Tensor]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    weight, w1, w2, scale = args
    return (weight if weight is not None and weight.requires_grad else None, w1, w2), (scale,)


def backward(
    grad: Tensor, weight: Tensor | None, w1: Tensor, w2: Tensor, scale: float, needs: Sequence[bool]
) -> tuple[Any, ...]:
    dw1, dw2 = kernels.backward(grad, w1, w2, scale, needs[1], needs[2])
    dweight = grad.to(weight.dtype, copy=True) if needs[0] and weight is not None else None
    return dweight, dw1, dw2, None


def backward_fake(
    grad: Tensor, weight: Any, w1: Tensor, w2: Tensor, scale: float, needs: Sequence[bool]
) -> tuple[Any, ...]:
    return common.empty_grads((weight, w1, w2, None), needs)


_run = bind(Fused("kron_merge", SCHEMA, 1, forward, fake, save, SCHEMA, backward, backward_fake))


def kron_merge(weight: Tensor | None, w1: Tensor, w2: Tensor, scale: Any = 1.0) -> Tensor:
    """The primitive of the same name. A window's axes are columns of w2; a tensor scale goes into w1."""
    if any(tensor is not None and tensor.dtype == torch.float64 for tensor in (weight, w1, w2)):
        return reference(weight, w1, w2, scale)
    if isinstance(scale, Tensor):
        (w1,), scale = scaled((w1,), scale), 1.0
    flat = None if weight is None else weight.flatten(1)
    merged = _run(flat, w1, w2.flatten(1), float(scale))
    return merged.view(merged.shape[0], -1, *w2.shape[2:])
