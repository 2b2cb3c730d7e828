"""The mask of primitives/dropout.py inside a kernel: the same hash of seed, row and column, nothing read but the seed.

Nine integer operations an element, on top of some thirty for each row and column of a tile. No traffic, no state.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ....primitives import dropout

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
