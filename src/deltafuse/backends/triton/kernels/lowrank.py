"""Low-rank paths beside a linear layer, forward and backward.

Forward    h = mask (x A^T)                          and, where asked, C = up_gain alpha h B^T + bias
Backward   q = mask alpha (dY up_gain) B             and, where asked, C = q A and G = dY gain
Gradients  dB = alpha up_gain dY^T h, dA = q^T x, d gain, d up_gain

Shapes: x (M, K), dY (M, N), A (r, K), B (N, r), h and q (M, r), bias, gain, up_gain (N,), mask (M / rows, r).
C is what the base product then adds itself to: y = C + x W^T, dX = C + dY W, in one cuBLAS call with beta = 1.

Traffic: forward reads x once and writes h (and C); backward reads dY once and writes q (and C, G); gradients read dY and
x once. Flops: 2 M r (K + N) each. Launches: one each. Nothing is recomputed. Deterministic: every output element is
summed by one program in a fixed order; where rows are split over programs, the last one to finish adds their parts in
order.

Precision: products accumulate in float32. h and q have the rank dtype: bfloat16 beside bfloat16, float32 beside float16
and float32, because a rank-space value may exceed float16's range while the result does not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import ceil_div, chunks_for, counter, dot_precision, pad_rank, rank_dtype


@triton.jit(do_not_specialize=["M", "rows"])
def lowrank_forward_kernel(
    x_ptr, a_ptr, b_ptr, bias_ptr, up_gain_ptr, mask_ptr, h_ptr, c_ptr,
    M, N, K, r, rows, alpha,
    x_rows, x_cols, a_rows, a_cols, b_rows, b_cols, c_rows,
    HAS_BIAS: tl.constexpr, HAS_GAIN: tl.constexpr, HAS_MASK: tl.constexpr, PREFILL: tl.constexpr,
    PRECISION: tl.constexpr, R: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One block of BM rows: h from x, then the rows of C."""
    rm = tl.program_id(0) * BM + tl.arange(0, BM)
    rr = tl.arange(0, R)
    rk = tl.arange(0, BK)
    wide = rm.to(tl.int64)
    rows_ok = (rm < M)[:, None]
    rank_ok = rr < r
    acc = tl.zeros((BM, R), tl.float32)
    for k in range(0, K, BK):
        cols_ok = (k + rk) < K
        x = tl.load(x_ptr + wide[:, None] * x_rows + (k + rk)[None, :] * x_cols, rows_ok & cols_ok[None, :], 0.0)
        a = tl.load(a_ptr + rr[:, None] * a_rows + (k + rk)[None, :] * a_cols, rank_ok[:, None] & cols_ok[None, :], 0.0)
        acc = tl.dot(x.to(h_ptr.dtype.element_ty), a.to(h_ptr.dtype.element_ty).T, acc, input_precision=PRECISION)
    if HAS_MASK:
        acc *= tl.load(mask_ptr + (wide // rows)[:, None] * r + rr[None, :], rows_ok & rank_ok[None, :], 0.0)
    h = acc.to(h_ptr.dtype.element_ty)
    tl.store(h_ptr + wide[:, None] * r + rr[None, :], h, rows_ok & rank_ok[None, :])
    if PREFILL:
        rn = tl.arange(0, BN)
        for n in range(0, N, BN):
            out_ok = (n + rn) < N
            where = (n + rn).to(tl.int64)
            b = tl.load(b_ptr + where[None, :] * b_rows + rr[:, None] * b_cols, rank_ok[:, None] & out_ok[None, :], 0.0)
            c = tl.dot(h, b.to(h.dtype), input_precision=PRECISION) * alpha
            if HAS_GAIN:
                c *= tl.load(up_gain_ptr + n + rn, out_ok, 0.0).to(tl.float32)[None, :]
            if HAS_BIAS:
                c += tl.load(bias_ptr + n + rn, out_ok, 0.0).to(tl.float32)[None, :]
            tl.store(c_ptr + wide[:, None] * c_rows + (n + rn)[None, :], c.to(c_ptr.dtype.element_ty),
                     rows_ok & out_ok[None, :])  # fmt: skip


@triton.jit(do_not_specialize=["M", "rows"])
def lowrank_backward_kernel(
    dy_ptr, a_ptr, b_ptr, gain_ptr, up_gain_ptr, mask_ptr, q_ptr, c_ptr, g_ptr,
    M, N, K, r, rows, alpha,
    dy_rows, dy_cols, a_rows, a_cols, b_rows, b_cols,
    HAS_GAIN: tl.constexpr, HAS_MASK: tl.constexpr, PREFILL: tl.constexpr,
    PRECISION: tl.constexpr, R: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One block of BM rows: q from dY (and dY times the gain), then the rows of C."""
    rm = tl.program_id(0) * BM + tl.arange(0, BM)
    rr = tl.arange(0, R)
    rn = tl.arange(0, BN)
    wide = rm.to(tl.int64)
    rows_ok = (rm < M)[:, None]
    rank_ok = rr < r
    acc = tl.zeros((BM, R), tl.float32)
    for n in range(0, N, BN):
        out_ok = (n + rn) < N
        where = (n + rn).to(tl.int64)
        dy = tl.load(dy_ptr + wide[:, None] * dy_rows + (n + rn)[None, :] * dy_cols, rows_ok & out_ok[None, :], 0.0)
        b = tl.load(b_ptr + where[:, None] * b_rows + rr[None, :] * b_cols, out_ok[:, None] & rank_ok[None, :], 0.0)
        if HAS_GAIN:
            gain = tl.load(gain_ptr + n + rn, out_ok, 0.0).to(tl.float32)
            tl.store(g_ptr + wide[:, None] * N + (n + rn)[None, :],
                     (dy.to(tl.float32) * gain[None, :]).to(g_ptr.dtype.element_ty), rows_ok & out_ok[None, :])  # fmt: skip
            b = b.to(tl.float32) * tl.load(up_gain_ptr + n + rn, out_ok, 0.0).to(tl.float32)[:, None]
        acc = tl.dot(dy.to(q_ptr.dtype.element_ty), b.to(q_ptr.dtype.element_ty), acc, input_precision=PRECISION)
    acc *= alpha
    if HAS_MASK:
        acc *= tl.load(mask_ptr + (wide // rows)[:, None] * r + rr[None, :], rows_ok & rank_ok[None, :], 0.0)
    q = acc.to(q_ptr.dtype.element_ty)
    tl.store(q_ptr + wide[:, None] * r + rr[None, :], q, rows_ok & rank_ok[None, :])
    if PREFILL:
        rk = tl.arange(0, BK)
        for k in range(0, K, BK):
            cols_ok = (k + rk) < K
            a = tl.load(a_ptr + rr[:, None] * a_rows + (k + rk)[None, :] * a_cols,
                        rank_ok[:, None] & cols_ok[None, :], 0.0)  # fmt: skip
            c = tl.dot(q, a.to(q.dtype), input_precision=PRECISION)
            tl.store(c_ptr + wide[:, None] * K + (k + rk)[None, :], c.to(c_ptr.dtype.element_ty),
                     rows_ok & cols_ok[None, :])  # fmt: skip


@triton.jit
def _arrive_last(counter_ptr, chunks):
    """Whether this program is the last of ``chunks`` to arrive; leaves the counter at zero for the next launch."""
    tl.debug_barrier()
    seen = tl.atomic_add(counter_ptr, 1, sem="acq_rel")
    last = seen == chunks - 1
    if last:
        tl.store(counter_ptr, 0)
    return last


@triton.jit(do_not_specialize=["M", "per_chunk", "chunks", "n_tiles"])
def lowrank_grad_kernel(
    dy_ptr, x_ptr, y_ptr, h_ptr, q_ptr, b_ptr, bias_ptr, gain_ptr, up_gain_ptr,
    da_ptr, db_ptr, dgain_ptr, dup_gain_ptr, part_ptr, counter_ptr,
    M, N, K, r, alpha, n_tiles, per_chunk, chunks,
    dy_rows, dy_cols, x_rows, x_cols, b_rows, b_cols, y_rows,
    HAS_BIAS: tl.constexpr, HAS_GAIN: tl.constexpr, SPLIT: tl.constexpr,
    PRECISION: tl.constexpr, R: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """BC columns of dB^T (tiles below ``n_tiles``) or of dA, over one chunk of rows."""
    tile = tl.program_id(0)
    chunk = tl.program_id(1)
    rr = tl.arange(0, R)
    rank_ok = rr < r
    is_up = tile < n_tiles
    cols = tl.where(is_up, tile, tile - n_tiles) * BC + tl.arange(0, BC)
    width = tl.where(is_up, N, K)
    cols_ok = cols < width
    acc = tl.zeros((R, BC), tl.float32)
    with_y = tl.zeros((BC,), tl.float32)
    plain = tl.zeros((BC,), tl.float32)
    stop = tl.minimum(M, (chunk + 1) * per_chunk)
    for m in range(chunk * per_chunk, stop, BM):
        rm = m + tl.arange(0, BM)
        wide = rm.to(tl.int64)
        ok = (rm < stop)[:, None]
        narrow = wide[:, None] * r + rr[None, :]
        inside = ok & cols_ok[None, :]
        if is_up:
            left = tl.load(h_ptr + narrow, ok & rank_ok[None, :], 0.0)
            right = tl.load(dy_ptr + wide[:, None] * dy_rows + cols[None, :].to(tl.int64) * dy_cols, inside, 0.0)
        else:
            left = tl.load(q_ptr + narrow, ok & rank_ok[None, :], 0.0)
            right = tl.load(x_ptr + wide[:, None] * x_rows + cols[None, :].to(tl.int64) * x_cols, inside, 0.0)
        acc = tl.dot(left.T, right.to(left.dtype), acc, input_precision=PRECISION)
        if HAS_GAIN:
            if is_up:
                y = tl.load(y_ptr + wide[:, None] * y_rows + cols[None, :], ok & cols_ok[None, :], 0.0)
                dy = right.to(tl.float32)
                with_y += tl.sum(dy * y.to(tl.float32), 0)
                plain += tl.sum(dy, 0)
    if SPLIT:
        # parts: (tiles, chunks, R + 2, BC)
        slot = part_ptr + (tile.to(tl.int64) * chunks + chunk) * (R + 2) * BC
        column = tl.arange(0, BC)
        tl.store(slot + rr[:, None] * BC + column[None, :], acc)
        if HAS_GAIN:
            tl.store(slot + R * BC + column, with_y)
            tl.store(slot + (R + 1) * BC + column, plain)
        if not _arrive_last(counter_ptr + tile, chunks):
            return
        acc = tl.zeros((R, BC), tl.float32)
        with_y = tl.zeros((BC,), tl.float32)
        plain = tl.zeros((BC,), tl.float32)
        for other in range(0, chunks):
            slot = part_ptr + (tile.to(tl.int64) * chunks + other) * (R + 2) * BC
            acc += tl.load(slot + rr[:, None] * BC + column[None, :], cache_modifier=".cg")
            if HAS_GAIN:
                with_y += tl.load(slot + R * BC + column, cache_modifier=".cg")
                plain += tl.load(slot + (R + 1) * BC + column, cache_modifier=".cg")
    inside = rank_ok[:, None] & cols_ok[None, :]
    if is_up:
        acc *= alpha
        if HAS_GAIN:
            b = tl.load(b_ptr + cols[None, :].to(tl.int64) * b_rows + rr[:, None] * b_cols, inside, 0.0).to(tl.float32)
            gain = tl.load(gain_ptr + cols, cols_ok, 1.0).to(tl.float32)
            up_gain = tl.load(up_gain_ptr + cols, cols_ok, 0.0).to(tl.float32)
            through_up = tl.sum(acc * b, 0)
            total = with_y - up_gain * through_up
            if HAS_BIAS:
                total -= plain * tl.load(bias_ptr + cols, cols_ok, 0.0).to(tl.float32)
            tl.store(dup_gain_ptr + cols, through_up, cols_ok)
            tl.store(dgain_ptr + cols, total / gain, cols_ok)
            acc *= up_gain[None, :]
        tl.store(db_ptr + cols[None, :].to(tl.int64) * r + rr[:, None], acc.to(db_ptr.dtype.element_ty), inside)
    else:
        tl.store(da_ptr + rr[:, None].to(tl.int64) * K + cols[None, :], acc.to(da_ptr.dtype.element_ty), inside)


@dataclass(frozen=True)
class Config:
    """block_m rows a program; block_c columns a step; warps and pipeline stages of one launch."""

    block_m: int
    block_c: int
    warps: int
    stages: int


def forward_config(rows: int, rank: int) -> Config:
    """Enough programs to fill the device come before wide blocks."""
    block_m = 16 if rows <= 2112 or rank > 64 else 32
    return Config(block_m, 128 if rank <= 64 else 64, 4, 4 if rank <= 64 else 3)


def grad_config(rank: int) -> Config:
    """Columns are the parallel axis, rows the reduction."""
    return Config(64, 64 if rank <= 64 else 32, 4, 4 if rank <= 64 else 2)


def forward(
    x: Tensor, down: Tensor, up: Tensor, bias: Tensor | None, up_gain: Tensor | None, mask: Tensor | None, alpha: float,
    prefill: bool, config: Config | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """(h (M, r) in the rank dtype, C (M, N) or None) for x (M, K)."""
    rows, inner = x.shape
    rank, wide = down.shape[0], up.shape[0]
    h = x.new_empty((rows, rank), dtype=rank_dtype(x.dtype))
    c = x.new_empty((rows, wide)) if prefill else None
    if rows == 0:
        return h, c
    config = config or forward_config(rows, rank)
    lowrank_forward_kernel[(ceil_div(rows, config.block_m),)](
        x, down, up, bias, up_gain, mask, h, c,
        rows, wide, inner, rank, rows if mask is None else rows // mask.shape[0], alpha,
        x.stride(0), x.stride(1), down.stride(0), down.stride(1), up.stride(0), up.stride(1), wide,
        bias is not None, up_gain is not None, mask is not None, prefill,
        dot_precision(h.dtype), pad_rank(rank), config.block_m, config.block_c, config.block_c,
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    return h, c


def backward(
    dy: Tensor, down: Tensor, up: Tensor, gain: Tensor | None, up_gain: Tensor | None, mask: Tensor | None,
    alpha: float, prefill: bool, config: Config | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """(q (M, r), C (M, K) or None, G (M, N) or None) for dY (M, N)."""
    rows, wide = dy.shape
    rank, inner = down.shape
    q = dy.new_empty((rows, rank), dtype=rank_dtype(dy.dtype))
    c = dy.new_empty((rows, inner)) if prefill else None
    g = None if gain is None else dy.new_empty((rows, wide))
    if rows == 0:
        return q, c, g
    config = config or forward_config(rows, rank)
    lowrank_backward_kernel[(ceil_div(rows, config.block_m),)](
        dy, down, up, gain, up_gain, mask, q, c, g,
        rows, wide, inner, rank, rows if mask is None else rows // mask.shape[0], alpha,
        dy.stride(0), dy.stride(1), down.stride(0), down.stride(1), up.stride(0), up.stride(1),
        gain is not None, mask is not None, prefill,
        dot_precision(q.dtype), pad_rank(rank), config.block_m, config.block_c, config.block_c,
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    return q, c, g


@dataclass(frozen=True)
class Grads:
    """Gradients of A (r, K), B (N, r), gain (N,) and up_gain (N,); None where not asked for."""

    down: Tensor | None
    up: Tensor | None
    gain: Tensor | None
    up_gain: Tensor | None


def gradients(
    dy: Tensor, x: Tensor, y: Tensor | None, h: Tensor, q: Tensor, down: Tensor, up: Tensor, bias: Tensor | None,
    gain: Tensor | None, up_gain: Tensor | None, alpha: float, want_down: bool, want_up: bool,
    config: Config | None = None,
) -> Grads:  # fmt: skip
    """Both factors' gradients in one launch, in the factors' own dtypes; with a gain also the two vectors'."""
    rows, wide = dy.shape
    inner, rank = x.shape[1], h.shape[1]
    want_up = want_up or gain is not None
    da = torch.empty_like(down, memory_format=torch.contiguous_format) if want_down else None
    db = torch.empty_like(up, memory_format=torch.contiguous_format) if want_up else None
    dgain = None if gain is None else gain.new_empty(wide, dtype=torch.float32)
    dup_gain = None if gain is None else gain.new_empty(wide, dtype=torch.float32)
    config = config or grad_config(rank)
    n_tiles = ceil_div(wide, config.block_c) if want_up else 0
    tiles = n_tiles + (ceil_div(inner, config.block_c) if want_down else 0)
    if tiles == 0:
        return Grads(None, None, None, None)
    per_chunk, chunks = chunks_for(rows, tiles, config.block_m, x.device)
    padded = pad_rank(rank)
    parts = None
    if chunks > 1:
        parts = x.new_empty(tiles * chunks * (padded + 2) * config.block_c, dtype=torch.float32)
    lowrank_grad_kernel[(tiles, chunks)](
        dy, x, y, h, q, up, bias, gain, up_gain, da, db, dgain, dup_gain, parts,
        counter(x.device, tiles) if chunks > 1 else None,
        rows, wide, inner, rank, alpha, n_tiles, per_chunk, chunks,
        dy.stride(0), dy.stride(1), x.stride(0), x.stride(1), up.stride(0), up.stride(1),
        0 if y is None else y.stride(0),
        bias is not None, gain is not None, chunks > 1,
        dot_precision(h.dtype), padded, config.block_m, config.block_c,
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    return Grads(da, db, dgain, dup_gain)
