"""GLoRA as one low-rank path: W (x + s A1 A2 x) + s B1 B2 x = W x + s [W A1 | B1] [A2; B2] x.

prepare  h = x [A2; B2]^T, up = [W A1 | B1] and down = [A2; B2], in one pass over x and one over W
columns  D = left^T right for right = x: left = q, D = [dA2; dB2], and beside it the parts of dup added up: dB1, and
         S = s dY^T h1; for right = W: left = S, D = dA1^T

Shapes: x (M, K), W (N, K), A1 (K, r1), A2 (r1, K), B1 (N, r2), B2 (r2, K), h and q (M, r), up (N, r), down (r, K),
S (N, r1), with r = r1 + r2. The input is never shifted, so no second x is written and the shift is never rounded to x's
dtype; what that costs is two passes over W, N K elements against 4 M K.

Traffic: prepare reads x and W once; columns reads x once, then W once. Flops: 2 r K (M + N) each. Launches: one each.
Deterministic: every output element is summed in a fixed order, by one program or, where the reduction is split, by the
last program to finish. Precision as in ``passes``: products accumulate in float32, rank-space tensors have the rank
dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import ceil_div, chunks_for, counter, dot_precision, launch, pad_rank, processors, rank_dtype
from .passes import Parts
from .reduction import arrive_last


@triton.jit
def _narrow(
    rows_ptr, first_ptr, second_ptr, pack_ptr, row, count, start, stop, r1, r, K, packed,
    by_row, by_col, first_rank, first_col, second_rank, second_col,
    TWO: tl.constexpr, PRECISION: tl.constexpr, RANK: tl.constexpr, R: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """BM rows times factors of rank r1 and r - r1 (TWO) or of rank r1 alone, over columns start to stop of K. The first
    ``packed`` rows of the stacked factors are also written."""
    rm = row + tl.arange(0, BM)
    rr = tl.arange(0, R)
    rk = tl.arange(0, BK)
    wide_rows = rm.to(tl.int64)[:, None] * by_row
    rows_ok = (rm < count)[:, None]
    first_ok = (rr < r1)[:, None]
    second_ok = ((rr >= r1) & (rr < r))[:, None]
    acc = tl.zeros((BM, R), tl.float32)
    for k in range(start, stop, BK):
        cols = k + rk
        cols_ok = (cols < stop)[None, :]
        wide = cols.to(tl.int64)[None, :]
        x = tl.load(rows_ptr + wide_rows + wide * by_col, rows_ok & cols_ok, 0.0)
        factor = tl.load(first_ptr + rr[:, None] * first_rank + wide * first_col, first_ok & cols_ok, 0.0).to(RANK)
        if TWO:
            other = tl.load(second_ptr + (rr - r1)[:, None] * second_rank + wide * second_col, second_ok & cols_ok, 0.0)
            factor = tl.where(first_ok, factor, other.to(RANK))
            tl.store(pack_ptr + rr[:, None] * K + wide, factor, (rr < packed)[:, None] & cols_ok)
        acc = tl.dot(x.to(RANK), factor.T, acc, input_precision=PRECISION)
    return acc


@triton.jit(do_not_specialize=["M", "x_tiles"])
def glora_prepare_kernel(
    x_ptr, w_ptr, a_up_ptr, a_down_ptr, b_up_ptr, b_down_ptr, h_ptr, up_ptr, down_ptr, part_ptr, counter_ptr,
    M, x_tiles, N, K, r1, r, per_split, splits,
    x_rows, x_cols, w_rows, w_cols, au_k, au_r, ad_r, ad_k, bu_n, bu_r, bd_r, bd_k,
    SPLIT: tl.constexpr, PRECISION: tl.constexpr, R: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Tiles below ``x_tiles``: BM rows of h. The others: BM rows of up. Each over one share of K."""
    tile = tl.program_id(0)
    split = tl.program_id(1)
    RANK: tl.constexpr = h_ptr.dtype.element_ty
    start = split * per_split
    stop = tl.minimum(K, start + per_split)
    from_x = tile < x_tiles
    if from_x:
        acc = _narrow(
            x_ptr, a_down_ptr, b_down_ptr, down_ptr, tile * BM, M, start, stop, r1, r, K, tl.where(tile == 0, r, 0),
            x_rows, x_cols, ad_r, ad_k, bd_r, bd_k, True, PRECISION, RANK, R, BM, BK,
        )  # fmt: skip
    else:
        acc = _narrow(
            w_ptr, a_up_ptr, a_up_ptr, down_ptr, (tile - x_tiles) * BM, N, start, stop, r1, r, K, 0,
            w_rows, w_cols, au_r, au_k, au_r, au_k, False, PRECISION, RANK, R, BM, BK,
        )  # fmt: skip
    rr = tl.arange(0, R)
    if SPLIT:
        flat = tl.arange(0, BM)[:, None] * R + rr[None, :]
        parts = part_ptr + tile.to(tl.int64) * splits * BM * R + flat
        tl.store(parts + split * BM * R, acc)
        if not arrive_last(counter_ptr + tile, splits):
            return
        acc = tl.zeros((BM, R), tl.float32)
        for other in range(0, splits):
            acc += tl.load(parts + other * BM * R, cache_modifier=".cg")
    rank_ok = (rr < r)[None, :]
    if from_x:
        rm = tile * BM + tl.arange(0, BM)
        tl.store(h_ptr + rm.to(tl.int64)[:, None] * r + rr[None, :], acc.to(RANK), (rm < M)[:, None] & rank_ok)
    else:
        rn = (tile - x_tiles) * BM + tl.arange(0, BM)
        wide = rn.to(tl.int64)[:, None]
        inside = (rn < N)[:, None] & rank_ok
        own = inside & (rr >= r1)[None, :]
        b_up = tl.load(b_up_ptr + wide * bu_n + (rr - r1)[None, :] * bu_r, own, 0.0)
        tl.store(up_ptr + wide * r + rr[None, :], tl.where(own, b_up.to(RANK), acc.to(RANK)), inside)


@triton.jit(do_not_specialize=["M", "up_tiles", "col_tiles", "per_chunk", "chunks"])
def glora_columns_kernel(
    left_ptr, right_ptr, first_ptr, second_ptr, up_part_ptr, s_ptr, b_up_ptr, part_ptr, counter_ptr,
    M, up_tiles, col_tiles, per_chunk, chunks, alpha, N, K, r1, r, right_rows, right_cols, first_rank, first_col,
    WANT_COLS: tl.constexpr, WANT_UP: tl.constexpr, SPLIT: tl.constexpr, TWO: tl.constexpr, PRECISION: tl.constexpr,
    R: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Programs below ``col_tiles * chunks``: BC columns of left^T right over a chunk of rows, the first r1 ranks to one
    tensor and the others to a second. The others: BC columns of dup^T from its parts."""
    place = tl.program_id(0)
    rr = tl.arange(0, R)
    first_ok = (rr < r1)[:, None]
    second_ok = ((rr >= r1) & (rr < r))[:, None]
    acc = tl.zeros((R, BC), tl.float32)
    if place < col_tiles * chunks:
        if WANT_COLS:
            tile = place % col_tiles
            chunk = place // col_tiles
            cols = tile * BC + tl.arange(0, BC)
            wide_cols = cols[None, :].to(tl.int64)
            cols_ok = (cols < K)[None, :]
            stop = tl.minimum(M, (chunk + 1) * per_chunk)
            for m in range(chunk * per_chunk, stop, BM):
                rm = m + tl.arange(0, BM)
                wide = rm.to(tl.int64)[:, None]
                ok = (rm < stop)[:, None]
                left = tl.load(left_ptr + wide * r + rr[None, :], ok & (rr < r)[None, :], 0.0)
                right = tl.load(right_ptr + wide * right_rows + wide_cols * right_cols, ok & cols_ok, 0.0)
                acc = tl.dot(left.T, right.to(left.dtype), acc, input_precision=PRECISION)
            if SPLIT:
                flat = rr[:, None] * BC + tl.arange(0, BC)[None, :]
                parts = part_ptr + tile.to(tl.int64) * chunks * R * BC + flat
                tl.store(parts + chunk * R * BC, acc)
                if not arrive_last(counter_ptr + tile, chunks):
                    return
                acc = tl.zeros((R, BC), tl.float32)
                for other in range(0, chunks):
                    acc += tl.load(parts + other * R * BC, cache_modifier=".cg")
            first_at = first_ptr + rr[:, None].to(tl.int64) * first_rank + wide_cols * first_col
            tl.store(first_at, acc.to(first_ptr.dtype.element_ty), first_ok & cols_ok)
            if TWO:
                second_at = second_ptr + (rr - r1)[:, None].to(tl.int64) * K + wide_cols
                tl.store(second_at, acc.to(second_ptr.dtype.element_ty), second_ok & cols_ok)
    else:
        if WANT_UP:
            cols = (place - col_tiles * chunks) * BC + tl.arange(0, BC)
            wide = cols[None, :].to(tl.int64)
            cols_ok = (cols < N)[None, :]
            parts = up_part_ptr + rr[:, None].to(tl.int64) * N + wide
            for _ in tl.range(0, up_tiles, loop_unroll_factor=4):
                acc += tl.load(parts, (rr < r)[:, None] & cols_ok, 0.0)
                parts += R * N
            acc *= alpha
            tl.store(s_ptr + wide * r1 + rr[:, None], acc.to(s_ptr.dtype.element_ty), first_ok & cols_ok)
            b_at = b_up_ptr + wide * (r - r1) + (rr - r1)[:, None]
            tl.store(b_at, acc.to(b_up_ptr.dtype.element_ty), second_ok & cols_ok)


@dataclass(frozen=True)
class Config:
    """block_m rows and block_c columns a step, warps and pipeline stages."""

    block_m: int
    block_c: int
    warps: int
    stages: int


def prepare_config(rank: int, narrow: bool) -> Config:
    """A block of x or W a step large enough that the copies in flight cover the memory's latency. ``narrow``: the rank
    dtype has 16 bits; three products for one of float32 leave registers for half the block."""
    if rank <= 64:
        return Config(64, 128 if rank <= 32 else 64, 4, 3) if narrow else Config(64, 64 if rank <= 32 else 32, 8, 3)
    return Config(32, 32, 4, 3) if narrow else Config(32, 32, 8, 2)


def columns_config(rank: int, narrow: bool) -> Config:
    """Columns are the parallel axis, rows the reduction."""
    if rank <= 32:
        return Config(64, 128, 8, 3)
    if rank <= 64:
        return Config(64 if narrow else 32, 64, 8, 3)
    return Config(64 if narrow else 32, 32, 8, 2)


@dataclass(frozen=True)
class Prepared:
    """h (M, r), up (N, r) and down (r, K) in the rank dtype."""

    h: Tensor
    up: Tensor
    down: Tensor


def prepare(x: Tensor, weight: Tensor, a_up: Tensor, a_down: Tensor, b_up: Tensor, b_down: Tensor) -> Prepared:
    """One pass over x (M, K) and one over W (N, K)."""
    rows, inner = x.shape
    wide, r1 = weight.shape[0], a_down.shape[0]
    rank, work = r1 + b_down.shape[0], rank_dtype(x.dtype)
    h, up = x.new_empty((rows, rank), dtype=work), x.new_empty((wide, rank), dtype=work)
    down = x.new_empty((rank, inner), dtype=work)
    c = prepare_config(rank, work == torch.bfloat16)
    x_tiles, padded = ceil_div(rows, c.block_m), pad_rank(rank)
    tiles = x_tiles + ceil_div(wide, c.block_m)
    if tiles == 0:
        return Prepared(h, up, down)
    wanted = max(1, min(ceil_div(2 * processors(x.device), tiles), inner // (2 * c.block_c)))
    share = ceil_div(ceil_div(inner, wanted), c.block_c) * c.block_c
    splits = max(1, ceil_div(inner, share))
    split = splits > 1
    parts = x.new_empty(tiles * splits * c.block_m * padded, dtype=torch.float32) if split else None
    launch(
        glora_prepare_kernel, (tiles, splits), c.warps, c.stages,
        x, weight, a_up, a_down, b_up, b_down, h, up, down, parts, counter(x.device, tiles) if split else None,
        rows, x_tiles, wide, inner, r1, rank, share, splits,
        *x.stride(), *weight.stride(), *a_up.stride(), *a_down.stride(), *b_up.stride(), *b_down.stride(),
        split, dot_precision(work), padded, c.block_m, c.block_c,
    )  # fmt: skip
    return Prepared(h, up, down)


def factor_grads(
    parts: Parts, x: Tensor, a_down: Tensor, b_up: Tensor, b_down: Tensor, alpha: float, want_down: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """(dA2, dB2, dB1, S) in one pass over x (M, K) and over the parts of dup; S in the rank dtype."""
    r1, inner = a_down.shape
    wide, rank = b_up.shape[0], r1 + b_down.shape[0]
    c = columns_config(rank, parts.q.dtype == torch.bfloat16)
    da = torch.empty_like(a_down, memory_format=torch.contiguous_format) if want_down else None
    db = torch.empty_like(b_down, memory_format=torch.contiguous_format) if want_down else None
    found = parts.up is not None
    dup = torch.empty_like(b_up, memory_format=torch.contiguous_format) if found else None
    s = parts.q.new_empty((wide, r1)) if found else None
    tiles, up_tiles = ceil_div(inner, c.block_c) if want_down else 0, ceil_div(wide, c.block_c) if found else 0
    if tiles + up_tiles > 0:
        _columns(c, parts.q, x, da, (inner, 1), db, r1, rank, tiles, up_tiles, parts, s, dup, wide, alpha)
    return da, db, dup, s


def prologue_grad(s: Tensor, weight: Tensor, a_up: Tensor) -> Tensor:
    """dA1 (K, r1) = W^T S in one pass over W (N, K)."""
    inner, r1 = a_up.shape
    c = columns_config(r1, s.dtype == torch.bfloat16)
    da = torch.empty_like(a_up, memory_format=torch.contiguous_format)
    tiles = ceil_div(inner, c.block_c)
    if tiles > 0:
        _columns(c, s, weight, da, (1, r1), None, r1, r1, tiles, 0, None, None, None, 0, 1.0)
    return da


def _columns(
    c: Config, left: Tensor, right: Tensor, first: Tensor | None, first_strides: tuple[int, int],
    second: Tensor | None, r1: int, rank: int, tiles: int, up_tiles: int, parts: Parts | None, s: Tensor | None,
    dup: Tensor | None, wide: int, alpha: float,
) -> None:  # fmt: skip
    """One launch of the columns kernel."""
    rows, inner = right.shape
    per_chunk, chunks = chunks_for(rows, max(1, tiles), c.block_m, right.device)
    split, padded = chunks > 1 and tiles > 0, pad_rank(rank)
    scratch = right.new_empty(tiles * chunks * padded * c.block_c, dtype=torch.float32) if split else None
    launch(
        glora_columns_kernel, (tiles * chunks + up_tiles,), c.warps, c.stages,
        left, right, first, second, None if parts is None else parts.up, s, dup, scratch,
        counter(right.device, tiles) if split else None,
        rows, 0 if parts is None else parts.tiles, tiles, per_chunk, chunks, float(alpha), wide, inner, r1, rank,
        *right.stride(), *first_strides,
        tiles > 0, up_tiles > 0, split, second is not None, dot_precision(left.dtype), padded, c.block_m, c.block_c,
    )  # fmt: skip
