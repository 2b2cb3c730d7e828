"""The epilogue of an adapted convolution: y + alpha (1x1 convolution of h by up) + bias.

y (B, N, *spatial), h (B, r, *spatial), up (N, r), bias (N,), alpha a number -> (B, N, *spatial). h may be wider than y.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ..core.precision import accumulate_dtype, branch_dtype
from .examples import Draw, Sizes, example
from .gemm import plain_math
from .registry import primitive

_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


@primitive("y + alpha (1x1 convolution of h by up) + bias")
def conv_epilogue(y: Tensor, h: Tensor, up: Tensor, alpha: float = 1.0, bias: Tensor | None = None) -> Tensor:
    """See the module's formula; y's dtype and memory format, batched tensors only."""
    axes = y.dim() - 2
    up = up if alpha == 1 else up.to(accumulate_dtype(up)) * alpha
    kernel = up.to(h.dtype).reshape(*up.shape, *(1,) * axes)
    with plain_math(y):
        branch = _CONV[axes](h, kernel, None if bias is None else bias.to(h.dtype))
    return y + branch.to(y.dtype)


def _spatial(sizes: Sizes) -> tuple[int, tuple[int, ...]]:
    """(batch, spatial) out of leading sizes: one to three spatial axes."""
    batch, spatial = sizes.lead[0], sizes.lead[1:]
    return batch, tuple(max(1, side) for side in spatial[:3]) or (1,)


def _maps(sizes: Sizes, draw: Draw, last: bool) -> tuple[Tensor, Tensor]:
    """y and h, h in the dtype of rank space; ``last``: channels are the fastest axis in memory."""
    batch, spatial = _spatial(sizes)
    wide = Draw(branch_dtype(draw.dtype), draw.device, draw.factors, draw.seed + 1, draw.local)
    if last:
        y, h = draw.data(batch, *spatial, sizes.out), wide.data(batch, *spatial, sizes.rank)
        return y.movedim(-1, 1), h.movedim(-1, 1)
    return draw.data(batch, sizes.out, *spatial), wide.data(batch, sizes.rank, *spatial)


@example("conv_epilogue", "channels first")
def _first(sizes: Sizes, draw: Draw) -> tuple[Any, ...]:
    return *_maps(sizes, draw, False), draw.factor(sizes.out, sizes.rank), 0.7, None


@example("conv_epilogue", "channels last, bias")
def _last(sizes: Sizes, draw: Draw) -> tuple[Any, ...]:
    return *_maps(sizes, draw, True), draw.factor(sizes.out, sizes.rank), 1.0, draw.data(sizes.out, grad=False)
