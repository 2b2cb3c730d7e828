"""The epilogue of an adapted convolution: low-rank product at every position, added to the base output with the bias.

One launch forward, one backward. Saved: h and up. The gradient of y is the incoming one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ....primitives.conv import conv_epilogue as reference
from ..binding import Fused, bind
from ..kernels import conv
from ..launch import MAX_KERNEL_RANK

SCHEMA = "Tensor y, Tensor h, Tensor up, float alpha, Tensor? bias"
SAVED = "Tensor h, Tensor up, Tensor? bias, float alpha"
_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def forward(y: Tensor, h: Tensor, up: Tensor, alpha: float, bias: Tensor | None) -> tuple[Tensor]:
    return (conv.forward(y.flatten(2), h.flatten(2), up, alpha, bias).view(y.shape),)


def fake(y: Tensor, *_: Any) -> tuple[Tensor]:
    return (torch.empty_like(y),)


def save(args: Sequence[Any], outputs: Sequence[Tensor]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    _, h, up, alpha, bias = args
    return (h, up, bias), (alpha,)


def backward(
    grad: Tensor, h: Tensor, up: Tensor, bias: Tensor | None, alpha: float, needs: Sequence[bool]
) -> tuple[Any, ...]:
    """Gradients of h, up and bias in their places; y's is ``grad``."""
    dout = grad.flatten(2)
    dh, dup = conv.backward(dout, h.flatten(2), up, alpha, needs[1], needs[2])
    dbias = dout.sum((0, 2), dtype=torch.float32).to(bias.dtype) if needs[4] and bias is not None else None
    return None, None if dh is None else dh.view(h.shape), dup, None, dbias


def backward_fake(
    grad: Tensor, h: Tensor, up: Tensor, bias: Tensor | None, alpha: float, needs: Sequence[bool]
) -> tuple[Any, ...]:
    dbias = bias.new_empty(bias.shape) if needs[4] and bias is not None else None
    return None, torch.empty_like(h) if needs[1] else None, up.new_empty(up.shape) if needs[2] else None, None, dbias


_run = bind(Fused("conv_epilogue", SCHEMA, 1, forward, fake, save, SAVED, backward, backward_fake, through=0))


def _dense(item: Tensor) -> Tensor:
    """``item`` itself where its spatial axes are one in memory, else a copy where they are."""
    last = _LAST.get(item.dim())
    flat = item.is_contiguous() or (last is not None and item.is_contiguous(memory_format=last))
    return item if flat or (item.dim() == 3 and item.transpose(1, 2).is_contiguous()) else item.contiguous()


def conv_epilogue(y: Tensor, h: Tensor, up: Tensor, alpha: float = 1.0, bias: Tensor | None = None) -> Tensor:
    """The primitive of the same name; a rank beyond the kernels' and float64 run the reference."""
    wide = any(item.dtype == torch.float64 for item in (y, h, up))
    if wide or not 0 < up.shape[1] <= MAX_KERNEL_RANK or h.dtype == torch.float16:
        return reference(y, h, up, alpha, bias)
    found: Tensor = _run(_dense(y), _dense(h), up, float(alpha), bias)
    return found
