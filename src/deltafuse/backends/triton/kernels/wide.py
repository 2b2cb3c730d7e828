"""The passes of kernels/passes.py for ranks at which they are matrix products like any other: the vendor's library runs
them, a kernel only what a gain adds (one pass over dY and y).

Same shapes, same results. Launches: one product for h, two for q and dB, one for dA, and small ones in rank space.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .dropout import dropped
from .gain import gain_grad
from .passes import Grads, Parts

KERNEL_RANK = 32
"""Up to this rank the kernels win: they read dY once where products read it twice."""


def applies(rank: int, dtype: torch.dtype) -> bool:
    """Whether products run this rank. float16 stays with the kernels: its rank space is float32."""
    return rank > KERNEL_RANK and dtype != torch.float16


def _scaled_product(a: Tensor, b: Tensor, alpha: float) -> Tensor:
    """alpha a b in one launch."""
    return torch.mm(a, b) if alpha == 1 else torch.addmm(a.new_empty(1), a, b, beta=0, alpha=alpha)


def _masked(rows: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return rows
    return (rows.view(mask.shape[0], -1, mask.shape[1]) * mask.to(rows.dtype)[:, None]).view(rows.shape)


def down(x: Tensor, a: Tensor, mask: Tensor | None) -> Tensor:
    """h (M, r)."""
    return _masked(torch.mm(x, a.to(x.dtype).t()), mask)


def grad(
    dy: Tensor, y: Tensor | None, h: Tensor, b: Tensor, gain: Tensor | None, up_gain: Tensor | None,
    mask: Tensor | None, alpha: float, want_q: bool, want_b: bool, seed: Tensor | None = None, threshold: int = 0,
) -> Parts:  # fmt: skip
    """q, and alpha dY^T h (N, r), without alpha beside a gain, as the only part there is. A seed masks dY for both."""
    kept = dy if seed is None else dropped(dy, seed, threshold)
    factor = b if up_gain is None else b * up_gain[:, None]
    q = _masked(_scaled_product(kept, factor.to(dy.dtype), alpha), mask) if want_q else h
    if gain is None:
        up = _scaled_product(kept.t(), h, alpha)[None] if want_b else None
        return Parts(q, None, up, None, 1)
    up = torch.mm(kept.t(), h)[None]
    assert y is not None
    g, sums = gain_grad(dy, y, gain)
    return Parts(q, g, up, sums, 1)


def finish(
    parts: Parts, x: Tensor, a: Tensor, b: Tensor, bias: Tensor | None, gain: Tensor | None, up_gain: Tensor | None,
    alpha: float, want_a: bool,
) -> Grads:  # fmt: skip
    """Gradients in their leaves' dtypes."""
    da = torch.mm(parts.q.t(), x).to(a.dtype) if want_a else None
    if parts.up is None:
        return Grads(da, None, None, None)
    raw = parts.up[0]
    if gain is None or up_gain is None or parts.vectors is None:
        return Grads(da, raw.to(b.dtype), None, None)
    through_up = alpha * (raw.float() * b.float()).sum(1)
    with_y, plain = parts.vectors.sum(0)
    total = with_y - up_gain * through_up
    if bias is not None:
        total = total - plain * bias.float()
    db = (raw.float() * (alpha * up_gain)[:, None]).to(b.dtype)
    return Grads(da, db, torch.where(gain == 0, 0.0, total / gain).to(gain.dtype), through_up.to(up_gain.dtype))
