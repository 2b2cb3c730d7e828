"""Random masks, drawn on the data's device from PyTorch's generator: a checkpoint's recompute draws the same."""

from __future__ import annotations

import torch
from torch import Tensor


def keep_mask(count: int, drop: float, rescale: bool, like: Tensor) -> Tensor:
    """(count,) of zeros and ones with P(0) = ``drop``; ``rescale`` divides by 1 - ``drop``, so the mean is kept."""
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    mask = (torch.rand(count, device=like.device, dtype=dtype) >= drop).to(dtype)
    return mask / (1.0 - drop) if rescale and drop < 1.0 else mask


def keep_scalar(drop: float, like: Tensor) -> Tensor:
    """0-d zero or one with P(0) = ``drop``: decides a whole layer without a host round trip or a graph break."""
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    return (torch.rand((), device=like.device, dtype=dtype) >= drop).to(dtype)
