"""What a decomposition gain and dropout add to a linear layer, beside the products.

gain_finish    y = gain base + drop(up_gain alpha h B^T) + bias, written over the base product (where no product has
               that epilogue itself); the gains and the dropout mask are optional, see kernels/dropout.py
gain_grad      G = dY gain, and per block of rows the column sums of dY y and of dY

base, y, dY and G (M, N), gain, up_gain and bias (N,), h (M, r), B (N, r). Traffic: base read and written once; dY and y
read once and G written once. One launch each, one program a tile, nothing recomputed, deterministic.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import ceil_div, dot_precision, launch, pad_rank
from .dropout import kept, row_keys, seed_keys


@triton.jit(do_not_specialize=["M", "threshold"])
def gain_finish_kernel(
    y_ptr, h_ptr, b_ptr, bias_ptr, gain_ptr, up_gain_ptr, seed_ptr,
    M, threshold, N, r, alpha, b_rows, b_cols,
    HAS_BIAS: tl.constexpr, HAS_GAIN: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
    R: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One tile of y."""
    rm = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    rn = tl.program_id(1) * BN + tl.arange(0, BN)
    rows_ok = (rm < M)[:, None]
    cols_ok = rn < N
    out = tl.zeros((BM, BN), tl.float32)
    for start in tl.range(0, r, R, num_stages=1):
        rr = start + tl.arange(0, R)
        rank_ok = rr < r
        h = tl.load(h_ptr + rm[:, None] * r + rr[None, :], rows_ok & rank_ok[None, :], 0.0)
        b = tl.load(b_ptr + rn[None, :].to(tl.int64) * b_rows + rr[:, None] * b_cols,
                    rank_ok[:, None] & cols_ok[None, :], 0.0)  # fmt: skip
        out = tl.dot(h, b.to(h.dtype), out, input_precision=PRECISION)
    out *= alpha
    if HAS_GAIN:
        out *= tl.load(up_gain_ptr + rn, cols_ok, 0.0).to(tl.float32)[None, :]
    if DROPOUT:
        first, second = seed_keys(seed_ptr)
        row, row_key = row_keys(first, second, rm)
        out = tl.where(kept(first, second, row, row_key, rn, threshold), out, 0.0)
    place = y_ptr + rm[:, None] * N + rn[None, :]
    inside = rows_ok & cols_ok[None, :]
    base = tl.load(place, inside, 0.0).to(tl.float32)
    if HAS_GAIN:
        base *= tl.load(gain_ptr + rn, cols_ok, 0.0).to(tl.float32)[None, :]
    out += base
    if HAS_BIAS:
        out += tl.load(bias_ptr + rn, cols_ok, 0.0).to(tl.float32)[None, :]
    tl.store(place, out.to(y_ptr.dtype.element_ty), inside)


_FINISH_BLOCKS = (64, 128, 8)
"""Rows and columns of a program, warps. Ranks go through a loop, so that registers do not grow with them."""


def finish(
    base: Tensor, h: Tensor, up: Tensor, bias: Tensor | None, gain: Tensor | None, up_gain: Tensor | None,
    alpha: float, seed: Tensor | None = None, threshold: int = 0,
) -> Tensor:  # fmt: skip
    """y in ``base``'s memory (contiguous). With a seed the low-rank part is masked; its scale is alpha's matter."""
    rows, wide = base.shape
    if rows == 0:
        return base
    rank = h.shape[1]
    block_m, block_n, warps = _FINISH_BLOCKS
    step = min(pad_rank(rank), 64 if h.dtype == torch.bfloat16 else 32)
    launch(
        gain_finish_kernel, (ceil_div(rows, block_m), ceil_div(wide, block_n)), warps, 1,
        base, h, up, bias, gain, up_gain, seed, rows, threshold, wide, rank, alpha, up.stride(0), up.stride(1),
        bias is not None, gain is not None, seed is not None, dot_precision(h.dtype), step, block_m, block_n,
    )  # fmt: skip
    return base


@triton.jit(do_not_specialize=["M"])
def gain_grad_kernel(
    dy_ptr, y_ptr, gain_ptr, g_ptr, sums_ptr, M, N, dy_rows, dy_cols,
    BM: tl.constexpr, BN: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """BN columns of G over BM rows, STEP at a time, and their sums: sums (tiles, 2, N)."""
    tile = tl.program_id(0)
    rn = tl.program_id(1) * BN + tl.arange(0, BN)
    cols_ok = rn < N
    gain = tl.load(gain_ptr + rn, cols_ok, 0.0).to(tl.float32)
    with_y = tl.zeros((STEP, BN), tl.float32)
    plain = tl.zeros((STEP, BN), tl.float32)
    for first in tl.range(0, BM, STEP, num_stages=STAGES):
        rm = tile.to(tl.int64) * BM + first + tl.arange(0, STEP)
        inside = (rm < M)[:, None] & cols_ok[None, :]
        at = rm[:, None] * N + rn[None, :]
        dy = tl.load(dy_ptr + rm[:, None] * dy_rows + rn[None, :].to(tl.int64) * dy_cols, inside, 0.0).to(tl.float32)
        y = tl.load(y_ptr + at, inside, 0.0).to(tl.float32)
        tl.store(g_ptr + at, (dy * gain[None, :]).to(g_ptr.dtype.element_ty), inside)
        with_y += dy * y
        plain += dy
    place = sums_ptr + tile.to(tl.int64) * 2 * N + rn
    tl.store(place, tl.sum(with_y, 0), cols_ok)
    tl.store(place + N, tl.sum(plain, 0), cols_ok)


_GRAD_BLOCKS = (64, 128, 64, 4, 1)


def gain_grad(
    dy: Tensor, y: Tensor, gain: Tensor, blocks: tuple[int, int, int, int, int] = _GRAD_BLOCKS
) -> tuple[Tensor, Tensor]:
    """(G (M, N), sums (tiles, 2, N) in float32); y is contiguous. blocks: rows and columns a program, rows a step,
    warps, pipeline stages."""
    rows, wide = dy.shape
    block_m, block_n, step, warps, stages = blocks
    tiles = max(1, ceil_div(rows, block_m))
    g = dy.new_empty((rows, wide))
    sums = dy.new_empty((tiles, 2, wide), dtype=torch.float32)
    launch(
        gain_grad_kernel, (tiles, ceil_div(wide, block_n)), warps, stages,
        dy, y, gain, g, sums, rows, wide, dy.stride(0), dy.stride(1), block_m, block_n, step, stages,
    )  # fmt: skip
    return g, sums
