"""Dtype rules, in one place.

* factors, norms, rotations and merges accumulate in float32, or float64 where anything involved is float64;
* adapter products run in the dtype the base layer runs in (the activation's, or autocast's);
* float16 products in rank space run in float32: a rank-space value may exceed 65504 while the result does not;
* mixed float16 and bfloat16: the activation's dtype wins, factors are converted to it.
"""

from __future__ import annotations

import torch
from torch import Tensor


def accumulate_dtype(*tensors: Tensor | None) -> torch.dtype:
    """float64 where any tensor is, else float32."""
    doubles = any(tensor is not None and tensor.dtype == torch.float64 for tensor in tensors)
    return torch.float64 if doubles else torch.float32


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype a matrix product on ``x`` runs in here, autocast included."""
    kind = x.device.type
    if x.dtype != torch.float64 and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return x.dtype


def branch_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of rank-space work beside a layer that runs in ``dtype``."""
    return torch.float32 if dtype == torch.float16 else dtype
