"""The mask of primitives/dropout.py inside a kernel: the same hash of seed, row and column, nothing read but the seed.

Nine integer operations an element, on top of some thirty for each row and column of a tile. No state, nothing saved.

dropped: dY where the forward kept its element, zero elsewhere, for ranks at which another pass over dY is cheaper than
masking it inside products. dY (M, N) is read once and written once; one launch, deterministic.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ....primitives import dropout
from ..launch import ceil_div, launch

MASKED_RANK = 32
"""Up to this rank the pass over dY masks it as it goes; above, it would need more registers than there are, or is the
library's."""

_FIRST = tl.constexpr(dropout.FIRST)
_SECOND = tl.constexpr(dropout.SECOND)
_GOLDEN = tl.constexpr(dropout.GOLDEN)


@triton.jit
def _times(x, factor: tl.constexpr):
    """Products and sums of words wrap around; a debugging build would take that for an error."""
    return tl.mul(x, factor, sanitize_overflow=False)


@triton.jit
def _plus(x, y):
    return tl.add(x, y, sanitize_overflow=False)


@triton.jit
def _mixed(x):
    """A word of 32 bits, finalized."""
    x = _times(x ^ (x >> 16), _FIRST)
    x = _times(x ^ (x >> 15), _SECOND)
    return x ^ (x >> 15)


@triton.jit
def seed_keys(seed_ptr):
    """Both words a seed becomes."""
    seed = tl.load(seed_ptr)
    first = _mixed(_plus(seed.to(tl.uint32), _GOLDEN))
    return first, _mixed((seed >> 32).to(tl.uint32) ^ first)


@triton.jit
def row_keys(first, second, rm):
    """Both keys of each row."""
    row = _mixed(_mixed(_plus(rm.to(tl.uint32), first)) ^ second)
    return row, _mixed(_plus(row, _GOLDEN))


@triton.jit
def kept(first, second, row, row_key, rn, threshold):
    """Which elements of a tile stay: rows by their keys, columns by number."""
    col = _mixed(_plus(_mixed(rn.to(tl.uint32) ^ second), first))
    x = _plus(row[:, None], col[None, :])
    x = _times(x ^ (x >> 16), _FIRST)
    x = _times(x ^ (x >> 15) ^ row_key[:, None], _SECOND)
    # an unsigned comparison in signed words, so that a threshold is one 32-bit argument
    return (x ^ 0x80000000).to(tl.int32, bitcast=True) >= threshold


@triton.jit(do_not_specialize=["M", "threshold"])
def dropped_kernel(
    dy_ptr, seed_ptr, out_ptr, M, threshold, N, dy_rows, dy_cols, BM: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """One tile."""
    rm = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    rn = tl.program_id(1) * BN + tl.arange(0, BN)
    first, second = seed_keys(seed_ptr)
    row, row_key = row_keys(first, second, rm)
    inside = (rm < M)[:, None] & (rn < N)[None, :]
    stays = inside & kept(first, second, row, row_key, rn, threshold)
    dy = tl.load(dy_ptr + rm[:, None] * dy_rows + rn[None, :].to(tl.int64) * dy_cols, stays, 0.0)
    tl.store(out_ptr + rm[:, None] * N + rn[None, :], dy, inside)


def dropped(dy: Tensor, seed: Tensor, threshold: int) -> Tensor:
    """dY (M, N) masked, without the scale of what is kept."""
    rows, wide = dy.shape
    out = dy.new_empty((rows, wide))
    if rows > 0:
        grid = ceil_div(rows, 32), ceil_div(wide, 256)
        launch(dropped_kernel, grid, 8, 1, dy, seed, out, rows, threshold, wide, dy.stride(0), dy.stride(1), 32, 256)
    return out
