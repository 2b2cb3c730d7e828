"""The base product with an epilogue: y = x W^T + bias + h up^T.

x (..., K), W (N, K), bias (N,), h (..., r), up (N, r) with every scale already folded in -> y (..., N).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from .registry import primitive


def plain_math(x: Tensor) -> AbstractContextManager:
    """Autocast switched off where it is on, so that a chosen dtype is the dtype that runs."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x weight^T in the tensors' own dtype, whatever autocast says."""
    with plain_math(x):
        return F.linear(x, weight)


@primitive("y = x W^T with an epilogue: + bias, + h up^T")
def gemm_epilogue(x: Tensor, weight: Tensor, bias: Tensor | None, h: Tensor | None, up: Tensor | None) -> Tensor:
    """See the module's formula. Output dtype is the base product's; the sum is rounded to it once."""
    y = F.linear(x, weight, bias)
    return y if h is None or up is None else add_product(y, h, up)


def add_product(y: Tensor, h: Tensor, up: Tensor) -> Tensor:
    """y + h up^T in y's dtype, in one operation where the dtypes agree."""
    if h.dtype != y.dtype or h.numel() == 0:
        return (y + product(h, up)).to(y.dtype)
    with plain_math(y):
        flat = torch.addmm(y.reshape(-1, y.shape[-1]), h.reshape(-1, h.shape[-1]), up.t())
    return flat.view(y.shape)
