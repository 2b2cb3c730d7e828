"""Both factors of a Hadamard product of two low-rank products, as one low-rank product of the ranks' product.

One launch forward, one backward. Saved: the four factors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ....primitives.lowrank import khatri_rao as reference
from ..binding import Fused, bind
from ..kernels import khatri_rao as kernels
from ..launch import MAX_KERNEL_RANK

SCHEMA = "Tensor up1, Tensor down1, Tensor up2, Tensor down2, ScalarType out_dtype"
SAVED = "Tensor up1, Tensor down1, Tensor up2, Tensor down2"


def fake(up1: Tensor, down1: Tensor, up2: Tensor, down2: Tensor, out_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    rank = up1.shape[1] * up2.shape[1]
    up = up1.new_empty((up1.shape[0], rank), dtype=torch.float32)
    return up, down1.new_empty((rank, down1.shape[1]), dtype=out_dtype)


def save(args: Sequence[Any], outputs: Sequence[Tensor]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    return tuple(args[:4]), ()


def _wanted(factor: Tensor, grad: Tensor | None, need: bool) -> Tensor | None:
    """A side whose product had no gradient has zeros."""
    if not need:
        return None
    return factor.new_zeros(factor.shape) if grad is None else grad


def backward(
    dup: Tensor | None, ddown: Tensor | None, up1: Tensor, down1: Tensor, up2: Tensor, down2: Tensor,
    needs: Sequence[bool],
) -> tuple[Any, ...]:  # fmt: skip
    """Gradients of the four factors, in the order of the arguments."""
    factors = (up1, down1, up2, down2)
    grads = kernels.backward(dup if needs[0] or needs[2] else None, ddown if needs[1] or needs[3] else None, *factors)
    return (*map(_wanted, factors, grads, needs[:4]), None)


def backward_fake(dup: Any, ddown: Any, *rest: Any) -> tuple[Any, ...]:
    *factors, needs = rest
    return (
        *(item.new_empty(item.shape) if need else None for item, need in zip(factors, needs[:4], strict=True)),
        None,
    )


_run = bind(Fused("khatri_rao", SCHEMA, 2, kernels.forward, fake, save, SAVED, backward, backward_fake, results=2))


def khatri_rao(
    up1: Tensor, down1: Tensor, up2: Tensor, down2: Tensor, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """The primitive of the same name; a rank beyond the kernels' and float64 factors run the reference."""
    if up2.shape[1] > MAX_KERNEL_RANK or any(item.dtype == torch.float64 for item in (up1, down1, up2, down2)):
        return reference(up1, down1, up2, down2, out_dtype)
    found: tuple[Tensor, Tensor] = _run(up1, down1, up2, down2, out_dtype or torch.float32)
    return found
