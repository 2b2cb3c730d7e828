"""Gains on the input columns of a linear layer with a low-rank path: the passes that are not the base product.

Forward    x' = gain x and h = mask ((down_gain x) A^T)
Backward   with T = dY W and q = mask alpha dY B given: dx = gain T + q (A down_gain), d gain = sum over rows of T x,
           dA = down_gain (q^T x), d down_gain = sum over ranks of A (q^T x), and dB added up from its parts

Shapes: x, x', T and dx (M, K), A (r, K), B (N, r), h and q (M, r), gain and down_gain (K,), mask (M / rows, r).

Traffic: forward reads x and writes x'; backward reads x and T and writes dx over T. Flops: 2 M K r forward, 4 M K r
backward. One launch each. Nothing is recomputed. Deterministic: an output element is summed in a fixed order, by one
program or, where the reduction is split, by the last program to finish. The precision is that of kernels/passes.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import (
    MAX_KERNEL_RANK,
    ceil_div,
    chunks_for,
    counter,
    dot_precision,
    launch,
    pad_rank,
    rank_dtype,
    split_axis,
)
from .passes import Parts
from .reduction import arrive_last


@triton.jit(do_not_specialize=["M", "rows"])
def columns_forward_kernel(
    x_ptr, gain_ptr, down_gain_ptr, a_ptr, mask_ptr, scaled_ptr, h_ptr, part_ptr, counter_ptr,
    M, rows, K, r, per_split, splits, x_rows, x_cols, a_rows, a_cols,
    SAME: tl.constexpr, HAS_MASK: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
    R: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """BM rows of x' and h over one share of K. SAME: down_gain is gain."""
    tile = tl.program_id(0)
    split = tl.program_id(1)
    RANK = h_ptr.dtype.element_ty
    rm = tile * BM + tl.arange(0, BM)
    rr = tl.arange(0, R)
    wide = rm.to(tl.int64)
    rows_ok = (rm < M)[:, None]
    rank_ok = rr < r
    acc = tl.zeros((BM, R), tl.float32)
    stop = tl.minimum(K, (split + 1) * per_split)
    for k in range(split * per_split, stop, BK):
        cols = k + tl.arange(0, BK)
        cols_ok = cols < stop
        at = cols.to(tl.int64)
        inside = rows_ok & cols_ok[None, :]
        x = tl.load(x_ptr + wide[:, None] * x_rows + at[None, :] * x_cols, inside, 0.0)
        a = tl.load(a_ptr + rr[:, None] * a_rows + at[None, :] * a_cols, rank_ok[:, None] & cols_ok[None, :], 0.0)
        gain = tl.load(gain_ptr + cols, cols_ok, 0.0).to(tl.float32)
        scaled = (x.to(tl.float32) * gain[None, :]).to(scaled_ptr.dtype.element_ty)
        tl.store(scaled_ptr + wide[:, None] * K + cols[None, :], scaled, inside)
        if not SAME:
            gain = tl.load(down_gain_ptr + cols, cols_ok, 0.0).to(tl.float32)
        a = (a.to(tl.float32) * gain[None, :]).to(RANK)
        acc = tl.dot(x.to(RANK), a.T, acc, input_precision=PRECISION)
    if SPLIT:
        flat = tl.arange(0, BM)[:, None] * R + rr[None, :]
        tl.store(part_ptr + (tile.to(tl.int64) * splits + split) * BM * R + flat, acc)
        if not arrive_last(counter_ptr + tile, splits):
            return
        acc = tl.zeros((BM, R), tl.float32)
        for other in range(0, splits):
            acc += tl.load(part_ptr + (tile.to(tl.int64) * splits + other) * BM * R + flat, cache_modifier=".cg")
    if HAS_MASK:
        acc *= tl.load(mask_ptr + (wide // rows)[:, None] * r + rr[None, :], rows_ok & rank_ok[None, :], 0.0)
    tl.store(h_ptr + wide[:, None] * r + rr[None, :], acc.to(RANK), rows_ok & rank_ok[None, :])


@triton.jit(do_not_specialize=["M", "part_tiles", "x_tiles", "per_chunk", "chunks"])
def columns_backward_kernel(
    x_ptr, dx_ptr, q_ptr, a_ptr, gain_ptr, down_gain_ptr, db_part_ptr,
    da_ptr, db_ptr, dgain_ptr, ddown_gain_ptr, part_ptr, counter_ptr,
    M, part_tiles, x_tiles, per_chunk, chunks, alpha, N, K, r, x_rows, x_cols, a_rows, a_cols, p_tiles, p_rows,
    SAME: tl.constexpr, HAS_BASE: tl.constexpr, WANT_A: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
    R: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Programs below ``x_tiles * chunks``: BC columns of dx, dA and the gains over a chunk of rows; dx holds T. The
    others: BC columns of dB^T from its parts."""
    place = tl.program_id(0)
    RANK = q_ptr.dtype.element_ty
    rr = tl.arange(0, R)
    rc = tl.arange(0, BC)
    rank_ok = rr < r
    acc = tl.zeros((R, BC), tl.float32)
    if place < x_tiles * chunks:
        tile = place % x_tiles
        chunk = place // x_tiles
        cols = tile * BC + rc
        cols_ok = cols < K
        at = cols.to(tl.int64)
        inside = rank_ok[:, None] & cols_ok[None, :]
        a = tl.load(a_ptr + rr[:, None] * a_rows + at[None, :] * a_cols, inside, 0.0).to(tl.float32)
        gain = tl.load(gain_ptr + cols, cols_ok, 0.0).to(tl.float32)
        down_gain = gain
        if not SAME:
            down_gain = tl.load(down_gain_ptr + cols, cols_ok, 0.0).to(tl.float32)
        scaled = (a * down_gain[None, :]).to(RANK)
        products = tl.zeros((BM, BC), tl.float32)
        stop = tl.minimum(M, (chunk + 1) * per_chunk)
        for m in range(chunk * per_chunk, stop, BM):
            rm = m + tl.arange(0, BM)
            wide = rm.to(tl.int64)
            ok = (rm < stop)[:, None]
            q = tl.load(q_ptr + wide[:, None] * r + rr[None, :], ok & rank_ok[None, :], 0.0)
            x = tl.load(x_ptr + wide[:, None] * x_rows + at[None, :] * x_cols, ok & cols_ok[None, :], 0.0)
            acc = tl.dot(q.T, x.to(RANK), acc, input_precision=PRECISION)
            if HAS_BASE:
                there = dx_ptr + wide[:, None] * K + cols[None, :]
                base = tl.load(there, ok & cols_ok[None, :], 0.0).to(tl.float32)
                products += base * x.to(tl.float32)
                dx = tl.dot(q, scaled, input_precision=PRECISION) + base * gain[None, :]
                tl.store(there, dx.to(dx_ptr.dtype.element_ty), ok & cols_ok[None, :])
        dgain = tl.sum(products, 0)
        if SPLIT:
            # parts: (x_tiles, chunks, R + 1, BC)
            flat = rr[:, None] * BC + rc[None, :]
            slot = part_ptr + (tile.to(tl.int64) * chunks + chunk) * (R + 1) * BC
            tl.store(slot + flat, acc)
            tl.store(slot + R * BC + rc, dgain)
            if not arrive_last(counter_ptr + tile, chunks):
                return
            acc = tl.zeros((R, BC), tl.float32)
            dgain = tl.zeros((BC,), tl.float32)
            for other in range(0, chunks):
                slot = part_ptr + (tile.to(tl.int64) * chunks + other) * (R + 1) * BC
                acc += tl.load(slot + flat, cache_modifier=".cg")
                dgain += tl.load(slot + R * BC + rc, cache_modifier=".cg")
        a = tl.load(a_ptr + rr[:, None] * a_rows + at[None, :] * a_cols, inside, 0.0).to(tl.float32)
        through = tl.sum(a * acc, 0)
        if SAME:
            dgain += through
        else:
            tl.store(ddown_gain_ptr + cols, through.to(ddown_gain_ptr.dtype.element_ty), cols_ok)
        if HAS_BASE:
            tl.store(dgain_ptr + cols, dgain.to(dgain_ptr.dtype.element_ty), cols_ok)
        if WANT_A:
            acc *= down_gain[None, :]
            tl.store(da_ptr + rr[:, None].to(tl.int64) * K + cols[None, :], acc.to(da_ptr.dtype.element_ty), inside)
    else:
        here = (place - x_tiles * chunks) * BC + rc
        block = rank_ok[:, None] & (here < N)[None, :]
        part = db_part_ptr + rr[:, None].to(tl.int64) * p_rows + here[None, :]
        for _ in range(0, part_tiles):
            acc += tl.load(part, block, 0.0).to(tl.float32)
            part += p_tiles
        acc *= alpha
        tl.store(db_ptr + here[None, :].to(tl.int64) * r + rr[:, None], acc.to(db_ptr.dtype.element_ty), block)


# -- launches ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Config:
    """block_m rows and block_c columns a step, warps and pipeline stages."""

    block_m: int
    block_c: int
    warps: int
    stages: int


_WIDE_RANK = Config(32, 64, 8, 2)
_FORWARD = {
    True: {16: Config(32, 128, 4, 4), 32: Config(32, 128, 4, 4), 64: Config(32, 64, 4, 3), 128: _WIDE_RANK,
           256: _WIDE_RANK},
    False: {16: Config(32, 64, 4, 3), 32: Config(32, 64, 8, 2), 64: Config(32, 64, 8, 2)},
}  # fmt: skip
_BACKWARD = {
    True: {16: Config(32, 128, 4, 3), 32: Config(32, 64, 4, 3), 64: Config(32, 64, 4, 3), 128: _WIDE_RANK,
           256: Config(32, 32, 8, 2)},
    False: {16: Config(32, 64, 4, 3), 32: Config(32, 64, 8, 2), 64: Config(32, 32, 8, 2)},
}  # fmt: skip
"""Whether the rank dtype has 16 bits, then the padded rank -> configuration."""


def takes(rank: int, dtype: torch.dtype) -> bool:
    """Whether the kernels run this rank beside a layer in ``dtype``: three-part products need the registers for it."""
    return 0 < rank <= (MAX_KERNEL_RANK if dtype == torch.bfloat16 else 64)


def _config(table: dict[bool, dict[int, Config]], rank: int, dtype: torch.dtype) -> Config:
    return table[dtype == torch.bfloat16][pad_rank(rank)]


def forward(
    x: Tensor, gain: Tensor, down_gain: Tensor | None, a: Tensor, mask: Tensor | None, config: Config | None = None
) -> tuple[Tensor, Tensor]:
    """(x' (M, K), h (M, r) in the rank dtype) for x (M, K). down_gain None: the same as gain."""
    rows, inner = x.shape
    rank, padded = a.shape[0], pad_rank(a.shape[0])
    scaled = x.new_empty((rows, inner))
    h = x.new_empty((rows, rank), dtype=rank_dtype(x.dtype))
    if rows == 0:
        return scaled, h
    c = config or _config(_FORWARD, rank, x.dtype)
    tiles = ceil_div(rows, c.block_m)
    share, splits = split_axis(inner, c.block_c, tiles, x.device)
    parts = x.new_empty(tiles * splits * c.block_m * padded, dtype=torch.float32) if splits > 1 else None
    launch(
        columns_forward_kernel, (tiles, splits), c.warps, c.stages,
        x, gain, down_gain, a, mask, scaled, h, parts, counter(x.device, tiles) if splits > 1 else None,
        rows, rows if mask is None else rows // max(1, mask.shape[0]), inner, rank, share, splits,
        x.stride(0), x.stride(1), a.stride(0), a.stride(1),
        down_gain is None, mask is not None, splits > 1, dot_precision(h.dtype), padded, c.block_m, c.block_c,
    )  # fmt: skip
    return scaled, h


@dataclass(frozen=True)
class Grads:
    """Gradients of A (r, K), B (N, r), gain and down_gain (K,); None where not asked for."""

    down: Tensor | None
    up: Tensor | None
    gain: Tensor | None
    down_gain: Tensor | None


def _like(item: Tensor | None, wanted: bool) -> Tensor | None:
    return torch.empty_like(item, memory_format=torch.contiguous_format) if wanted and item is not None else None


def backward(
    parts: Parts, x: Tensor, base: Tensor | None, a: Tensor, b: Tensor, gain: Tensor, down_gain: Tensor | None,
    alpha: float, want_x: bool, want_a: bool, config: Config | None = None,
) -> Grads:  # fmt: skip
    """Gradients beside dx, which is written over ``base`` = dY W (M, K). want_x: dx or something summed over rows is
    wanted at all; dB is made where ``parts`` has any of it."""
    rows, inner = x.shape
    wide, rank = b.shape
    padded = pad_rank(rank)
    c = config or _config(_BACKWARD, rank, x.dtype)
    found = Grads(
        _like(a, want_a), _like(b, parts.up is not None), _like(gain, base is not None), _like(down_gain, want_x)
    )
    x_tiles = ceil_div(inner, c.block_c) if want_x else 0
    n_tiles = ceil_div(wide, c.block_c) if parts.up is not None else 0
    if x_tiles + n_tiles == 0:
        return found
    per_chunk, chunks = chunks_for(rows, max(1, x_tiles), c.block_m, x.device)
    split = chunks > 1 and want_x
    scratch = x.new_empty(x_tiles * chunks * (padded + 1) * c.block_c, dtype=torch.float32) if split else None
    p_tiles, p_rows = (0, 0) if parts.up is None else parts.up.stride()[:2]
    launch(
        columns_backward_kernel, (x_tiles * chunks + n_tiles,), c.warps, c.stages,
        x, base, parts.q, a, gain, down_gain, parts.up, found.down, found.up, found.gain, found.down_gain, scratch,
        counter(x.device, x_tiles) if split else None,
        rows, parts.tiles, x_tiles, per_chunk, chunks, alpha, wide, inner, rank,
        x.stride(0), x.stride(1), a.stride(0), a.stride(1), p_tiles, p_rows,
        down_gain is None, base is not None, want_a, split, dot_precision(parts.q.dtype), padded, c.block_m, c.block_c,
    )  # fmt: skip
    return found
