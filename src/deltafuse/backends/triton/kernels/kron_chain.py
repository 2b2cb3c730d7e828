"""Kronecker products with a low-rank second factor: (w1 (x) B A) x, forward and backward.

Forward    h = x A^T, g = alpha w1 h and C = g B^T + bias, with x as (M m, n), h as (M, m, r), g as (M, l, r)
Backward   the same kernel on dY with the transposes: p = dY B, q = alpha w1^T p, C = q A
Gradients  dB = dY^T g, dA = q^T x, dw1 = alpha sum over rows of p h^T

Shapes: x (M, m n), w1 (l, m), A (r, n), B (k, r), bias (l k,), C (M, l k), h and q (M m, r), g and p (M l, r). C is
what the base product then adds itself to. l, m and r up to 128, or 64 beside float16 and float32.

Mixing over m is one small tensor-core product: a program's rows times the block-diagonal matrix of w1, so h never
leaves registers for it. Traffic: forward reads x once and writes C, h and g; backward reads dY once and writes C, p and
q; the gradients read dY and x once. Flops: 2 M r (m n + l m + l k) each. Launches: one each. Nothing is recomputed.
Deterministic: where rows are split over programs, the last one to finish adds their parts in order.

Precision: h, g, p and q have the rank dtype (bfloat16 beside bfloat16, else float32), sums are float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import ceil_div, counter, dot_precision, launch, pad_rank, processors, rank_dtype
from .reduction import arrive_last

_MOST = {torch.bfloat16: 128, torch.float32: 64}
"""Sides of w1 and ranks, by rank dtype: what registers hold."""
_SPLIT_ROWS = 512


@triton.jit
def block_diagonal(w_ptr, out_side, in_side, w_out, w_in, B: tl.constexpr, OP: tl.constexpr, IP: tl.constexpr):
    """B copies of w (out_side, in_side) along the diagonal, each padded to (OP, IP)."""
    out = tl.arange(0, B * OP)[:, None]
    inp = tl.arange(0, B * IP)[None, :]
    own = (out // OP == inp // IP) & (out % OP < out_side) & (inp % IP < in_side)
    return tl.load(w_ptr + (out % OP) * w_out + (inp % IP) * w_in, own, 0.0)


@triton.jit
def diagonal_sum(acc, B: tl.constexpr, OP: tl.constexpr, IP: tl.constexpr):
    """(B OP, B IP) -> (OP, IP): the sum of the blocks on the diagonal."""
    out = tl.arange(0, B * OP)[:, None] // OP
    inp = tl.arange(0, B * IP)[None, :] // IP
    blocks = tl.reshape(tl.where(out == inp, acc, 0.0), (B, OP, B, IP))
    return tl.sum(tl.sum(blocks, 2), 0)


@triton.jit(do_not_specialize=["M"])
def kron_chain_kernel(
    x_ptr, down_ptr, mix_ptr, up_ptr, bias_ptr, h_ptr, g_ptr, c_ptr,
    M, m, l, n, k, r, alpha,
    x_rows, x_cols, down_r, down_n, mix_l, mix_m, up_k, up_r,
    HAS_BIAS: tl.constexpr, PREFILL: tl.constexpr, PRECISION: tl.constexpr,
    R: tl.constexpr, BM: tl.constexpr, MP: tl.constexpr, LP: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """BM rows: h from x, g from h, then the rows of C. A row is MP lines of n on the way in, LP lines of k on the way
    out."""
    rr = tl.arange(0, R)
    rank_ok = (rr < r)[None, :]
    line = tl.arange(0, BM * MP)
    row = tl.program_id(0) * BM + line // MP
    part = line % MP
    ok = ((row < M) & (part < m))[:, None]
    at = row.to(tl.int64) * x_rows + (part * n).to(tl.int64) * x_cols
    rk = tl.arange(0, BK)
    acc = tl.zeros((BM * MP, R), tl.float32)
    for start in range(0, n, BK):
        cols = start + rk
        cols_ok = cols < n
        x = tl.load(x_ptr + at[:, None] + cols[None, :].to(tl.int64) * x_cols, ok & cols_ok[None, :], 0.0)
        down = tl.load(down_ptr + cols[:, None].to(tl.int64) * down_n + rr[None, :].to(tl.int64) * down_r,
                       cols_ok[:, None] & rank_ok, 0.0)  # fmt: skip
        acc = tl.dot(x.to(h_ptr.dtype.element_ty), down.to(h_ptr.dtype.element_ty), acc, input_precision=PRECISION)
    h = acc.to(h_ptr.dtype.element_ty)
    tl.store(h_ptr + (row.to(tl.int64) * m + part)[:, None] * r + rr[None, :], h, ok & rank_ok)

    mix = block_diagonal(mix_ptr, l, m, mix_l, mix_m, BM, LP, MP).to(h.dtype)
    g = (tl.dot(mix, h, input_precision=PRECISION) * alpha).to(h.dtype)
    line = tl.arange(0, BM * LP)
    row = tl.program_id(0) * BM + line // LP
    part = line % LP
    ok = ((row < M) & (part < l))[:, None]
    tl.store(g_ptr + (row.to(tl.int64) * l + part)[:, None] * r + rr[None, :], g, ok & rank_ok)
    if PREFILL:
        rn = tl.arange(0, BN)
        at = (row.to(tl.int64) * l + part) * k
        for start in range(0, k, BN):
            cols = start + rn
            cols_ok = (cols < k)[None, :]
            up = tl.load(up_ptr + rr[:, None].to(tl.int64) * up_r + cols[None, :].to(tl.int64) * up_k,
                         (rr < r)[:, None] & cols_ok, 0.0)  # fmt: skip
            c = tl.dot(g, up.to(g.dtype), input_precision=PRECISION)
            if HAS_BIAS:
                c += tl.load(bias_ptr + (part * k)[:, None] + cols[None, :], ok & cols_ok, 0.0).to(tl.float32)
            tl.store(c_ptr + at[:, None] + cols[None, :], c.to(c_ptr.dtype.element_ty), ok & cols_ok)


@triton.jit
def _over_chunks(acc, place, part_ptr, counter_ptr, tile, chunk, chunks, SIZE: tl.constexpr):
    """(the sum of every chunk's ``acc`` in order, whether this program holds it)."""
    parts = part_ptr + tile.to(tl.int64) * chunks * SIZE + place
    tl.store(parts + chunk.to(tl.int64) * SIZE, acc)
    last = arrive_last(counter_ptr + tile, chunks)
    acc = tl.zeros_like(acc)
    for other in range(0, tl.where(last, chunks, 0)):
        acc += tl.load(parts + other * SIZE, cache_modifier=".cg")
    return acc, last


@triton.jit
def _product_tile(
    narrow_ptr, wide_ptr, cols, cols_ok, begin, stop, side, width, r, wide_rows, wide_cols,
    PRECISION: tl.constexpr, R: tl.constexpr, BV: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """narrow^T wide for BC columns: narrow (M side, r), wide (M, side width) seen as (M side, width)."""
    rr = tl.arange(0, R)
    acc = tl.zeros((R, BC), tl.float32)
    first = begin.to(tl.int64) * side
    lines = (stop - begin) * side
    for start in range(0, lines, BV):
        near = start + tl.arange(0, BV)
        ok = near < lines
        line = first + near
        narrow = tl.load(narrow_ptr + line[None, :] * r + rr[:, None], ok[None, :] & (rr < r)[:, None], 0.0)
        at = (begin + near // side).to(tl.int64) * wide_rows + (near % side * width).to(tl.int64) * wide_cols
        wide = tl.load(wide_ptr + at[:, None] + cols[None, :].to(tl.int64) * wide_cols,
                       ok[:, None] & cols_ok[None, :], 0.0)  # fmt: skip
        acc = tl.dot(narrow, wide.to(narrow.dtype), acc, input_precision=PRECISION)
    return acc


@triton.jit
def _mix_tile(
    p_ptr, h_ptr, begin, stop, l, m, r,
    PRECISION: tl.constexpr, R: tl.constexpr, BM: tl.constexpr, LP: tl.constexpr, MP: tl.constexpr,
):  # fmt: skip
    """Sum over rows of p h^T, (LP, MP)."""
    STEP: tl.constexpr = min(R, 32)
    out = tl.arange(0, BM * LP)
    inp = tl.arange(0, BM * MP)
    acc = tl.zeros((BM * LP, BM * MP), tl.float32)
    for start in range(begin, stop, BM):
        p_row, h_row = start + out // LP, start + inp // MP
        p_at = (p_row.to(tl.int64) * l + out % LP)[:, None] * r
        h_at = (h_row.to(tl.int64) * m + inp % MP)[:, None] * r
        for rank in tl.static_range(0, R, STEP):
            rr = rank + tl.arange(0, STEP)[None, :]
            p = tl.load(p_ptr + p_at + rr, ((p_row < stop) & (out % LP < l))[:, None] & (rr < r), 0.0)
            h = tl.load(h_ptr + h_at + rr, ((h_row < stop) & (inp % MP < m))[:, None] & (rr < r), 0.0)
            acc = tl.dot(p, h.T, acc, input_precision=PRECISION)
    return diagonal_sum(acc, BM, LP, MP)


@triton.jit(do_not_specialize=["M", "up_tiles", "down_tiles", "per_chunk", "chunks"])
def kron_chain_grad_kernel(
    dy_ptr, x_ptr, h_ptr, g_ptr, p_ptr, q_ptr, ddown_ptr, dmix_ptr, dup_ptr, part_ptr, counter_ptr,
    M, m, l, n, k, r, alpha, up_tiles, down_tiles, per_chunk, chunks,
    dy_rows, dy_cols, x_rows, x_cols,
    SPLIT: tl.constexpr, PRECISION: tl.constexpr, R: tl.constexpr, BM: tl.constexpr, MP: tl.constexpr, LP: tl.constexpr,
    BV: tl.constexpr, BC: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """One chunk of rows for BC columns of dB^T, then for BC columns of dA, then for all of dw1."""
    tile = tl.program_id(0)
    chunk = tl.program_id(1)
    begin = chunk * per_chunk
    stop = tl.minimum(M, begin + per_chunk)
    last = chunk == 0  # without chunks every program holds its sum
    if tile < up_tiles + down_tiles:
        is_up = tile < up_tiles
        rr = tl.arange(0, R)
        near = tl.arange(0, BC)
        cols = tl.where(is_up, tile, tile - up_tiles) * BC + near
        cols_ok = cols < tl.where(is_up, k, n)
        if is_up:
            acc = _product_tile(g_ptr, dy_ptr, cols, cols_ok, begin, stop, l, k, r, dy_rows, dy_cols,
                                PRECISION, R, BV, BC)  # fmt: skip
        else:
            acc = _product_tile(q_ptr, x_ptr, cols, cols_ok, begin, stop, m, n, r, x_rows, x_cols,
                                PRECISION, R, BV, BC)  # fmt: skip
        if SPLIT:
            place = rr[:, None] * BC + near[None, :]
            acc, last = _over_chunks(acc, place, part_ptr, counter_ptr, tile, chunk, chunks, SIZE)
        inside = (rr < tl.where(last, r, 0))[:, None] & cols_ok[None, :]
        wide = cols[None, :].to(tl.int64)
        if is_up:
            tl.store(dup_ptr + wide * r + rr[:, None], acc.to(dup_ptr.dtype.element_ty), inside)
        else:
            tl.store(ddown_ptr + rr[:, None].to(tl.int64) * n + wide, acc.to(ddown_ptr.dtype.element_ty), inside)
    else:
        out = tl.arange(0, LP)[:, None]
        inp = tl.arange(0, MP)[None, :]
        mixed = _mix_tile(p_ptr, h_ptr, begin, stop, l, m, r, PRECISION, R, BM, LP, MP)
        if SPLIT:
            mixed, last = _over_chunks(mixed, out * MP + inp, part_ptr, counter_ptr, tile, chunk, chunks, SIZE)
        tl.store(dmix_ptr + out * m + inp, (mixed * alpha).to(dmix_ptr.dtype.element_ty),
                 (out < tl.where(last, l, 0)) & (inp < m))  # fmt: skip


@dataclass(frozen=True)
class Config:
    """block_c columns and block_v lines a step; warps and pipeline stages of one launch."""

    block_c: int
    block_v: int
    warps: int
    stages: int


def config_for(lines: int, padded: int, work: torch.dtype) -> Config:
    """Forward and backward: about 100 KiB of loads in flight a program at small ranks."""
    large = lines > 64
    if work == torch.float32:
        return Config(64 if padded <= 32 and not large else 32, 0, 8 if large or padded > 32 else 4, 2)
    if padded <= 32 and not large:
        return Config(128, 0, 4, 4)
    return Config(64, 0, 8 if large or padded > 64 else 4, 3 if padded <= 64 else 2)


def grad_config(lines: int, padded: int, work: torch.dtype) -> Config:
    """Columns are the parallel axis, lines the reduction."""
    warps = 8 if lines > 64 else 4
    if work == torch.float32:
        return Config(64, 64, warps, 2) if padded <= 32 and lines <= 64 else Config(32, 32, 8, 1)
    return Config(64, 64, warps, 4 if padded <= 32 else 3) if padded <= 64 else Config(32, 64, warps, 2)


def in_scope(sides: tuple[int, ...], rank: int, dtype: torch.dtype) -> bool:
    """Whether w1 of these sides and w2 of this rank run here beside a layer in ``dtype``."""
    return min(*sides, rank) > 0 and max(*sides, rank) <= _MOST[rank_dtype(dtype)]


@dataclass(frozen=True)
class Blocks:
    """rows a program, and the lines one row has in it on either side of the mixing."""

    rows: int
    inner: int
    outer: int

    @property
    def lines(self) -> int:
        return self.rows * max(self.inner, self.outer)


def blocks_for(inner: int, outer: int, lines: int = 64) -> Blocks:
    """About ``lines`` lines a program, at least 16 on either side, which is what tensor cores take."""
    inner, outer = _power(inner), _power(outer)
    rows = max(1, lines // max(inner, outer))
    least = max(1, 16 // rows)
    return Blocks(rows, max(inner, least), max(outer, least))


def _power(side: int) -> int:
    return 1 << (side - 1).bit_length()


def apply(
    x: Tensor, down: Tensor, mix: Tensor, up: Tensor, bias: Tensor | None, alpha: float, prefill: bool,
    dtype: torch.dtype, transposed: bool = False, config: Config | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """(h, g, C in ``dtype`` or None) for x (M, m n); with ``transposed`` (p, q, C) for dY (M, l k) in x's place."""
    rows = x.shape[0]
    if transposed:
        down, mix, up = up.t(), mix.t(), down.t()
    (outer, inner), (rank, n), k = mix.shape, down.shape, up.shape[0]
    work = rank_dtype(x.dtype)
    h = x.new_empty((rows * inner, rank), dtype=work)
    g = x.new_empty((rows * outer, rank), dtype=work)
    c = x.new_empty((rows, outer * k), dtype=dtype) if prefill else None
    if rows == 0:
        return h, g, c
    blocks = blocks_for(inner, outer)
    config = config or config_for(blocks.lines, pad_rank(rank), work)
    launch(
        kron_chain_kernel, (ceil_div(rows, blocks.rows),), config.warps, config.stages,
        x, down, mix, up, bias, h, g, c,
        rows, inner, outer, n, k, rank, alpha,
        x.stride(0), x.stride(1), down.stride(0), down.stride(1), mix.stride(0), mix.stride(1),
        up.stride(0), up.stride(1),
        bias is not None, prefill, dot_precision(work), pad_rank(rank),
        blocks.rows, blocks.inner, blocks.outer, config.block_c, config.block_c,
    )  # fmt: skip
    return h, g, c


def gradients(
    dy: Tensor, x: Tensor, h: Tensor, g: Tensor, p: Tensor, q: Tensor, down: Tensor, mix: Tensor, up: Tensor,
    alpha: float, needs: tuple[bool, bool, bool], config: Config | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of down (r, n), mix (l, m) and up (k, r) in one launch; ``needs`` says which, in that order."""
    rows = x.shape[0]
    (outer, inner), (rank, n), k = mix.shape, down.shape, up.shape[0]
    found = tuple(
        torch.empty_like(leaf, memory_format=torch.contiguous_format) if need else None
        for leaf, need in zip((down, mix, up), needs, strict=True)
    )
    blocks, padded = blocks_for(inner, outer), pad_rank(rank)
    config = config or grad_config(blocks.lines, padded, h.dtype)
    up_tiles = ceil_div(k, config.block_c) if needs[2] else 0
    down_tiles = ceil_div(n, config.block_c) if needs[0] else 0
    tiles = up_tiles + down_tiles + needs[1]
    if tiles == 0:
        return None, None, None
    wanted = max(1, min(ceil_div(2 * processors(x.device), tiles), rows * max(inner, outer) // _SPLIT_ROWS, rows))
    per_chunk = max(1, ceil_div(rows, wanted))
    chunks = max(1, ceil_div(rows, per_chunk))
    size = max(padded * config.block_c, blocks.inner * blocks.outer)
    parts = x.new_empty(tiles * chunks * size, dtype=torch.float32) if chunks > 1 else None
    launch(
        kron_chain_grad_kernel, (tiles, chunks), config.warps, config.stages,
        dy, x, h, g, p, q, *found, parts, counter(x.device, tiles) if chunks > 1 else None,
        rows, inner, outer, n, k, rank, alpha, up_tiles, down_tiles, per_chunk, chunks,
        dy.stride(0), dy.stride(1), x.stride(0), x.stride(1),
        chunks > 1, dot_precision(h.dtype), padded, blocks.rows, blocks.inner, blocks.outer,
        config.block_v, config.block_c, size,
    )  # fmt: skip
    return found  # type: ignore[return-value]
