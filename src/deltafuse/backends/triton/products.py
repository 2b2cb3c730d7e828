"""The base product with a low-rank epilogue: which of two ways runs it.

fused: one Triton kernel, nothing of the layer's size is written twice. pieces: the vendor library's product, then the
low-rank part added in place. Both are exact; which is faster depends on card and shape.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...primitives.gemm import plain_math
from .kernels import gain as gain_kernel
from .kernels import gemm as gemm_kernel
from .launch import ceil_div

FUSED = True
MAX_RANK = 64
"""Ranks above are products worth a launch of their own: the epilogue would read their factors unpipelined."""
FORCED = False
"""Run the fused kernel on CPU tensors too: for tests in the interpreter."""
FILLED = 96
"""Tiles of 128 x 256 below which the vendor's library, which splits sums, is ahead."""


def with_lowrank(
    a: Tensor, weight: Tensor, h: Tensor, up: Tensor, alpha: float, *, transposed: bool = False,
    bias: Tensor | None = None, gain: Tensor | None = None, up_gain: Tensor | None = None,
    drop: tuple[Any, ...] = (),
) -> Tensor:  # fmt: skip
    """y = gain (a W^T) + drop(up_gain alpha h up^T) + bias for a (M, K), W (N, K), h (M, r), up (N, r).

    ``transposed``: y = a W + alpha h up for a (M, N), up (r, K), the backward product. ``drop``:
    dropout's seed and threshold; its mask is made in one pass after the product, as no epilogue hides that much work.
    """
    if a.shape[0] == 0:
        return a.new_empty((0, weight.shape[1 if transposed else 0]))
    if not drop and _fused(a, weight, h, transposed):
        return gemm_kernel.gemm(
            a, weight, transposed_b=not transposed, bias=bias, gain=gain, h=h, up=up, up_gain=up_gain, scale=alpha
        )
    if gain is not None or drop:
        return gain_kernel.finish(torch.mm(a, weight.t()), h, up, bias, gain, up_gain, alpha, *drop)
    matrix = up if transposed else up.t()
    if transposed:
        y = torch.mm(a, weight)
    else:
        y = F.linear(a, weight, None if bias is None else bias.to(a.dtype))
    if h.dtype == y.dtype:
        return y.addmm_(h, matrix.to(h.dtype), alpha=alpha)
    with plain_math(a):  # float32 rank space beside float16: autocast would take its range away
        return y.add_(h @ matrix.to(h.dtype), alpha=alpha)


def _fused(a: Tensor, weight: Tensor, h: Tensor, transposed: bool) -> bool:
    """Whether the fused kernel runs this product: where it was measured to win, on Hopper with enough tiles to fill it.

    Elsewhere the vendor's product plus one in-place pass never costs more than plain PyTorch does.
    """
    if not FUSED or a.dtype == torch.float32 or h.shape[1] > MAX_RANK:
        return False
    if not a.is_cuda:
        return FORCED
    wide = weight.shape[1 if transposed else 0]
    capability, _ = gemm_kernel.device_facts(a.device)
    return capability[0] == 9 and ceil_div(a.shape[0], 128) * ceil_div(wide, 256) >= FILLED
