"""The base product with an epilogue: y = x W^T + bias + alpha h up^T.

x (..., K), W (N, K), bias (N,), h (..., r), up (N, r), alpha a number -> y (..., N).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.precision import accumulate_dtype
from .registry import primitive


def plain_math(x: Tensor) -> AbstractContextManager:
    """Autocast switched off where it is on, so that a chosen dtype is the dtype that runs."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x weight^T in the tensors' own dtype, whatever autocast says."""
    with plain_math(x):
        return F.linear(x, weight)


@primitive("y = x W^T with an epilogue: + bias, + alpha h up^T")
def gemm_epilogue(
    x: Tensor, weight: Tensor, bias: Tensor | None, h: Tensor | None, up: Tensor | None, alpha: float = 1.0
) -> Tensor:
    """See the module's formula. Output dtype is the base product's; the sum is rounded to it once."""
    y = F.linear(x, weight, bias)
    return y if h is None or up is None else add_product(y, h, up, alpha)


def add_product(y: Tensor, h: Tensor, up: Tensor, alpha: float = 1.0) -> Tensor:
    """y + alpha h up^T in y's dtype, in one operation where h has that dtype; ``up`` is converted to h's."""
    if h.dtype != y.dtype or h.numel() == 0:
        up = up if alpha == 1 else up.to(accumulate_dtype(up)) * alpha
        return (y + product(h, up.to(h.dtype))).to(y.dtype)
    with plain_math(y):
        rows, ranks = y.reshape(-1, y.shape[-1]), h.reshape(-1, h.shape[-1])
        flat = torch.addmm(rows, ranks, up.to(h.dtype).t(), alpha=alpha)
    return flat.view(y.shape)
