"""The decomposition epilogue: y = gain base + up_gain alpha h B^T + bias, written over the base product.

base and y (M, N), gain, up_gain and bias (N,), h (M, r), B (N, r). Traffic: base read and written once. One launch, one
program a tile, nothing recomputed, deterministic.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..launch import ceil_div, dot_precision, pad_rank


@triton.jit(do_not_specialize=["M"])
def gain_finish_kernel(
    y_ptr, h_ptr, b_ptr, bias_ptr, gain_ptr, up_gain_ptr, M, N, r, alpha, b_rows, b_cols,
    HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr, R: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One tile of y."""
    rm = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    rn = tl.program_id(1) * BN + tl.arange(0, BN)
    rr = tl.arange(0, R)
    rows_ok = (rm < M)[:, None]
    cols_ok = rn < N
    rank_ok = rr < r
    h = tl.load(h_ptr + rm[:, None] * r + rr[None, :], rows_ok & rank_ok[None, :], 0.0)
    b = tl.load(b_ptr + rn[None, :].to(tl.int64) * b_rows + rr[:, None] * b_cols,
                rank_ok[:, None] & cols_ok[None, :], 0.0)  # fmt: skip
    out = tl.dot(h, b.to(h.dtype), input_precision=PRECISION) * alpha
    out *= tl.load(up_gain_ptr + rn, cols_ok, 0.0).to(tl.float32)[None, :]
    place = y_ptr + rm[:, None] * N + rn[None, :]
    inside = rows_ok & cols_ok[None, :]
    base = tl.load(place, inside, 0.0).to(tl.float32)
    out += base * tl.load(gain_ptr + rn, cols_ok, 0.0).to(tl.float32)[None, :]
    if HAS_BIAS:
        out += tl.load(bias_ptr + rn, cols_ok, 0.0).to(tl.float32)[None, :]
    tl.store(place, out.to(y_ptr.dtype.element_ty), inside)


def finish(
    base: Tensor, h: Tensor, up: Tensor, bias: Tensor | None, gain: Tensor, up_gain: Tensor, alpha: float
) -> Tensor:
    """y in ``base``'s memory (contiguous)."""
    rows, wide = base.shape
    if rows == 0:
        return base
    rank = h.shape[1]
    block_m, block_n = (64, 128) if rank <= 64 else (32, 64)
    gain_finish_kernel[(ceil_div(rows, block_m), ceil_div(wide, block_n))](
        base, h, up, bias, gain, up_gain, rows, wide, rank, alpha, up.stride(0), up.stride(1),
        bias is not None, dot_precision(h.dtype), pad_rank(rank), block_m, block_n,
        num_warps=8 if rank <= 64 else 4, num_stages=1,
    )  # fmt: skip
    return base
