"""A low-rank delta merged into a weight.

Forward   W' = [W +] s P,  P = B1 A1,  (B1 A1) * (B2 A2)  or  B1 A1 + B2 A2
Backward  T = dW' * (the other side's product), or dW' itself;  dB = s T A^T,  dA = s B^T T,  d s = sum dW' * P

Shapes: W, W' and dW' (N, K), B (N, r), A (r, K), s a number times an optional 0-d tensor.
Traffic: forward reads W once and writes W' once, 2 N K elements; backward reads dW' twice (row blocks for the ups,
column blocks for the downs; each block of ranks again where ranks are many). Flops: 2 N K r a pair forward; backward
4 N K r a pair and for the Hadamard product 8. One launch each. Recomputed: both products' tiles in the Hadamard
backward; nothing of N x K size is kept. Deterministic: each output element is summed by one program in a fixed order;
where a reduction is split, the last program to finish adds the parts in order.

Precision: sums are float32. Forward multiplies the factors as float32 (bfloat16 ones as they are), tf32 where W' is
rounded to 16 bits; backward multiplies in the rank dtype beside dW'.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import ceil_div, chunks_for, counter, dot_precision, launch, pad_rank, rank_dtype
from .reduction import arrive_last

ONE, PRODUCT, SUM = 0, 1, 2
"""How pairs combine."""


@triton.jit
def product_tile(
    b_ptr, a_ptr, n, k, n_ok, k_ok, r, b_rows, b_cols, a_rows, a_cols,
    WORK: tl.constexpr, PRECISION: tl.constexpr, R: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One (BN, BK) tile of B A, R ranks at a time."""
    acc = tl.zeros((BN, BK), tl.float32)
    for start in range(0, r, R):
        rr = start + tl.arange(0, R)
        ok = rr < r
        b = tl.load(b_ptr + n[:, None] * b_rows + rr[None, :] * b_cols, n_ok[:, None] & ok[None, :], 0.0)
        a = tl.load(a_ptr + rr[:, None] * a_rows + k[None, :] * a_cols, ok[:, None] & k_ok[None, :], 0.0)
        acc = tl.dot(b.to(WORK), a.to(WORK), acc, input_precision=PRECISION)
    return acc


@triton.jit
def merge_kernel(
    w_ptr, b1_ptr, a1_ptr, b2_ptr, a2_ptr, scale_ptr, out_ptr,
    N, K, r1, r2, number, w_rows, w_cols,
    b1_rows, b1_cols, a1_rows, a1_cols, b2_rows, b2_cols, a2_rows, a2_cols,
    MODE: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_SCALE: tl.constexpr,
    WORK: tl.constexpr, PRECISION: tl.constexpr, R: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One tile of W'."""
    n0 = tl.program_id(1).to(tl.int64) * BN
    k0 = tl.program_id(0).to(tl.int64) * BK
    n = tl.arange(0, BN)
    k = tl.arange(0, BK)
    n_ok = n < N - n0
    k_ok = k < K - k0
    b1_ptr += n0 * b1_rows
    a1_ptr += k0 * a1_cols
    out = product_tile(
        b1_ptr, a1_ptr, n, k, n_ok, k_ok, r1, b1_rows, b1_cols, a1_rows, a1_cols, WORK, PRECISION, R, BN, BK
    )
    if MODE != 0:
        b2_ptr += n0 * b2_rows
        a2_ptr += k0 * a2_cols
        other = product_tile(
            b2_ptr, a2_ptr, n, k, n_ok, k_ok, r2, b2_rows, b2_cols, a2_rows, a2_cols, WORK, PRECISION, R, BN, BK
        )
        out = out * other if MODE == 1 else out + other
    out *= number
    if HAS_SCALE:
        out *= tl.load(scale_ptr).to(tl.float32)
    ok = n_ok[:, None] & k_ok[None, :]
    if HAS_WEIGHT:
        w_ptr += n0 * w_rows + k0 * w_cols
        out += tl.load(w_ptr + n[:, None] * w_rows + k[None, :] * w_cols, ok, 0.0).to(tl.float32)
    out_ptr += n0 * K + k0
    tl.store(out_ptr + n[:, None] * K + k[None, :], out.to(out_ptr.dtype.element_ty), ok)


@triton.jit
def _side(
    dw_ptr, left1_ptr, left2_ptr, fixed1_ptr, fixed2_ptr,
    base, C, rr, start, stop, r1, r2, dw_s, dw_c,
    left1_r, left1_s, left2_r, left2_s, fixed1_r, fixed1_c, fixed2_r, fixed2_c,
    MODE: tl.constexpr, WHOLE: tl.constexpr, WORK: tl.constexpr, PRECISION: tl.constexpr,
    R: tl.constexpr, BS: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Sums over s from ``start`` to ``stop`` of left[r, s] T[s, c] for ranks ``rr`` of both pairs, T formed by tiles.

    For downs s is a row and c a column of dW', left is B^T and fixed is A; for ups the other way round. Tiles start at
    64-bit bases and are walked in 32 bits.
    """
    c = tl.arange(0, BC)
    s = tl.arange(0, BS)
    c_ok = c < C - base
    dw_ptr += base * dw_c + start * dw_s
    left1_ptr += start * left1_s
    fixed1_ptr += base * fixed1_c
    dw_at = s[:, None] * dw_s + c[None, :] * dw_c
    left1_at = rr[:, None] * left1_r + s[None, :] * left1_s
    acc1 = tl.zeros((R, BC), tl.float32)
    acc2 = tl.zeros((R, BC), tl.float32)
    if MODE != 0:
        left2_ptr += start * left2_s
        fixed2_ptr += base * fixed2_c
        left2_at = rr[:, None] * left2_r + s[None, :] * left2_s
    if MODE == 1 and WHOLE:
        fixed1 = tl.load(fixed1_ptr + rr[:, None] * fixed1_r + c[None, :] * fixed1_c,
                         (rr < r1)[:, None] & c_ok[None, :], 0.0).to(WORK)  # fmt: skip
        fixed2 = tl.load(fixed2_ptr + rr[:, None] * fixed2_r + c[None, :] * fixed2_c,
                         (rr < r2)[:, None] & c_ok[None, :], 0.0).to(WORK)  # fmt: skip
    for left in range(0, stop - start, BS):
        s_ok = s < stop - start - left
        dw = tl.load(dw_ptr + dw_at, s_ok[:, None] & c_ok[None, :], 0.0)
        left1 = tl.load(left1_ptr + left1_at, (rr < r1)[:, None] & s_ok[None, :], 0.0).to(WORK)
        if MODE == 0:
            acc1 = tl.dot(left1, dw.to(WORK), acc1, input_precision=PRECISION)
        else:
            left2 = tl.load(left2_ptr + left2_at, (rr < r2)[:, None] & s_ok[None, :], 0.0).to(WORK)
            if MODE == 1:
                grad = dw.to(tl.float32)
                if WHOLE:
                    other = tl.dot(left2.T, fixed2, input_precision=PRECISION)
                else:
                    other = product_tile(
                        left2_ptr, fixed2_ptr, s, c, s_ok, c_ok, r2, left2_s, left2_r, fixed2_r, fixed2_c,
                        WORK, PRECISION, R, BS, BC,
                    )  # fmt: skip
                acc1 = tl.dot(left1, (grad * other).to(WORK), acc1, input_precision=PRECISION)
                if WHOLE:
                    other = tl.dot(left1.T, fixed1, input_precision=PRECISION)
                else:
                    other = product_tile(
                        left1_ptr, fixed1_ptr, s, c, s_ok, c_ok, r1, left1_s, left1_r, fixed1_r, fixed1_c,
                        WORK, PRECISION, R, BS, BC,
                    )  # fmt: skip
                acc2 = tl.dot(left2, (grad * other).to(WORK), acc2, input_precision=PRECISION)
            else:
                acc1 = tl.dot(left1, dw.to(WORK), acc1, input_precision=PRECISION)
                acc2 = tl.dot(left2, dw.to(WORK), acc2, input_precision=PRECISION)
            left2_ptr += left2_s * BS
        dw_ptr += dw_s * BS
        left1_ptr += left1_s * BS
    return acc1, acc2


@triton.jit(do_not_specialize=["n_tiles", "per_up", "per_down", "chunks", "tiles"])
def merge_grad_kernel(
    dw_ptr, b1_ptr, a1_ptr, b2_ptr, a2_ptr, scale_ptr, db1_ptr, da1_ptr, db2_ptr, da2_ptr, dscale_ptr,
    part_ptr, total_ptr, counter_ptr,
    N, K, r1, r2, number, n_tiles, tiles, per_up, per_down, chunks, dw_rows, dw_cols,
    b1_rows, b1_cols, a1_rows, a1_cols, b2_rows, b2_cols, a2_rows, a2_cols,
    MODE: tl.constexpr, HAS_UP: tl.constexpr, HAS_DOWN: tl.constexpr, HAS_SCALE: tl.constexpr,
    WANT_SCALE: tl.constexpr, SPLIT: tl.constexpr, WHOLE: tl.constexpr,
    WORK: tl.constexpr, PRECISION: tl.constexpr, R: tl.constexpr, BS: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """R ranks of BC rows of the ups (tiles below ``n_tiles``) or of BC columns of the downs, over one chunk of the
    reduction."""
    tile = tl.program_id(0)
    chunk = tl.program_id(1)
    block = tl.program_id(2)
    mine = tile * tl.num_programs(2) + block
    is_up = tile < n_tiles
    local = tl.arange(0, BC)
    base = tl.where(is_up, tile, tile - n_tiles).to(tl.int64) * BC
    c = base + local
    rr = block * R + tl.arange(0, R)
    if is_up:
        start = chunk.to(tl.int64) * per_up
        acc1, acc2 = _side(
            dw_ptr, a1_ptr, a2_ptr, b1_ptr, b2_ptr, base, N, rr, start, tl.minimum(K, start + per_up), r1, r2,
            dw_cols, dw_rows, a1_rows, a1_cols, a2_rows, a2_cols, b1_cols, b1_rows, b2_cols, b2_rows,
            MODE, WHOLE, WORK, PRECISION, R, BS, BC,
        )  # fmt: skip
    else:
        start = chunk.to(tl.int64) * per_down
        acc1, acc2 = _side(
            dw_ptr, b1_ptr, b2_ptr, a1_ptr, a2_ptr, base, K, rr, start, tl.minimum(N, start + per_down), r1, r2,
            dw_rows, dw_cols, b1_cols, b1_rows, b2_cols, b2_rows, a1_rows, a1_cols, a2_rows, a2_cols,
            MODE, WHOLE, WORK, PRECISION, R, BS, BC,
        )  # fmt: skip
    if SPLIT:
        # parts: (tiles, rank blocks, chunks, 2, R, BC)
        place = tl.arange(0, R)[:, None] * BC + local[None, :]
        slot = part_ptr + (mine.to(tl.int64) * chunks + chunk) * (2 * R * BC)
        tl.store(slot + place, acc1)
        if MODE != 0:
            tl.store(slot + R * BC + place, acc2)
        if not arrive_last(counter_ptr + mine, chunks):
            return
        acc1 = tl.zeros((R, BC), tl.float32)
        acc2 = tl.zeros((R, BC), tl.float32)
        for other in range(0, chunks):
            slot = part_ptr + (mine.to(tl.int64) * chunks + other) * (2 * R * BC)
            acc1 += tl.load(slot + place, cache_modifier=".cg")
            if MODE != 0:
                acc2 += tl.load(slot + R * BC + place, cache_modifier=".cg")
    scale = number
    if HAS_SCALE:
        scale *= tl.load(scale_ptr).to(tl.float32)
    ok1 = (rr < r1)[:, None] & (c < tl.where(is_up, N, K))[None, :]
    ok2 = (rr < r2)[:, None] & (c < tl.where(is_up, N, K))[None, :]
    if is_up:
        if HAS_UP:
            tl.store(db1_ptr + c[None, :] * r1 + rr[:, None], (acc1 * scale).to(db1_ptr.dtype.element_ty), ok1)
            if MODE != 0:
                tl.store(db2_ptr + c[None, :] * r2 + rr[:, None], (acc2 * scale).to(db2_ptr.dtype.element_ty), ok2)
            if WANT_SCALE:
                b = tl.load(b1_ptr + c[None, :] * b1_rows + rr[:, None] * b1_cols, ok1, 0.0).to(tl.float32)
                through = tl.sum(acc1 * b)
                if MODE == 2:
                    b = tl.load(b2_ptr + c[None, :] * b2_rows + rr[:, None] * b2_cols, ok2, 0.0).to(tl.float32)
                    through += tl.sum(acc2 * b)
                tl.store(total_ptr + mine, through)
                partials = n_tiles * tl.num_programs(2)
                if arrive_last(counter_ptr + tiles * tl.num_programs(2), partials):
                    total = tl.zeros((BC,), tl.float32)
                    for first in range(0, partials, BC):
                        total += tl.load(total_ptr + first + local, first + local < partials, 0.0, cache_modifier=".cg")
                    tl.store(dscale_ptr, (tl.sum(total) * number).to(dscale_ptr.dtype.element_ty))
    else:
        if HAS_DOWN:
            wide = rr[:, None].to(tl.int64)
            tl.store(da1_ptr + wide * K + c[None, :], (acc1 * scale).to(da1_ptr.dtype.element_ty), ok1)
            if MODE != 0:
                tl.store(da2_ptr + wide * K + c[None, :], (acc2 * scale).to(da2_ptr.dtype.element_ty), ok2)


@dataclass(frozen=True)
class Config:
    """block_s: the axis a program walks (rows of W' forward). block_c: the axis it owns (columns of W' forward).
    ranks: how many ranks it holds at a time."""

    block_s: int
    block_c: int
    ranks: int
    warps: int
    stages: int


def forward_config(mode: int, padded: int, precise: bool) -> Config:
    """Bound by W' itself: wide rows, and few enough accumulators for two programs a multiprocessor.

    ``precise``: three products for one, whose operands are held twice.
    """
    return Config(64, 128 if mode == ONE and not precise else 64, min(32, padded), 4, 2)


def grad_config(mode: int, padded: int, wide: bool) -> Config:
    """Accumulators grow with the rank, twice as fast for two pairs; ``wide`` (float32 dW') holds operands twice."""
    if mode == ONE:
        ranks = min(padded, 64 if wide else 128)
        return Config(64, 64, ranks, 4, 3) if ranks <= 64 and not wide else Config(32, 32, ranks, 4, 3)
    if padded == 16:
        return Config(64, 32, 16, 4, 2)
    if mode == PRODUCT and wide and padded > 32:
        return Config(32, 32, 16, 4, 2)
    return Config(32, 32, min(padded, 32 if wide or mode == SUM else 64), 8, 1 if mode == SUM else 2)


_TL = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


def _strides(*factors: Tensor | None) -> tuple[int, ...]:
    return tuple(step for item in factors for step in ((0, 0) if item is None else item.stride()))


def forward(
    weight: Tensor | None, up1: Tensor, down1: Tensor, up2: Tensor | None, down2: Tensor | None, scalar: Tensor | None,
    number: float, mode: int, out_dtype: torch.dtype, config: Config | None = None,
) -> Tensor:  # fmt: skip
    """W' (N, K) in ``out_dtype``."""
    wide, inner = up1.shape[0], down1.shape[1]
    out = up1.new_empty((wide, inner), dtype=out_dtype)
    if out.numel() == 0:
        return out
    factors = (up1, down1, up2, down2)
    narrow = all(item is None or item.dtype == torch.bfloat16 for item in factors)
    precise = dot_precision(torch.float32) if out_dtype == torch.float32 else "tf32"
    rank1, rank2 = up1.shape[1], 0 if up2 is None else up2.shape[1]
    config = config or forward_config(mode, pad_rank(max(rank1, rank2)), precise == "tf32x3")
    launch(
        merge_kernel, (ceil_div(inner, config.block_c), ceil_div(wide, config.block_s)), config.warps, config.stages,
        weight, up1, down1, up2, down2, scalar, out,
        wide, inner, rank1, rank2, number,
        *_strides(weight, *factors),
        mode, weight is not None, scalar is not None,
        tl.bfloat16 if narrow else tl.float32, precise, config.ranks, config.block_s, config.block_c,
    )  # fmt: skip
    return out


@dataclass(frozen=True)
class Grads:
    """Gradients of the factors and of the tensor scale; None where there is none or none was asked for."""

    up1: Tensor | None = None
    down1: Tensor | None = None
    up2: Tensor | None = None
    down2: Tensor | None = None
    scalar: Tensor | None = None


def _like(factor: Tensor | None, want: bool) -> Tensor | None:
    return factor.new_empty(factor.shape) if want and factor is not None else None


def backward(
    dw: Tensor, up1: Tensor, down1: Tensor, up2: Tensor | None, down2: Tensor | None, scalar: Tensor | None,
    number: float, mode: int, want_up: bool, want_down: bool, want_scalar: bool, config: Config | None = None,
) -> Grads:  # fmt: skip
    """All gradients in one launch, in their leaves' dtypes; ups and downs of both pairs come together."""
    wide, inner = up1.shape[0], down1.shape[1]
    want_up = want_up or want_scalar
    rank1, rank2 = up1.shape[1], 0 if up2 is None else up2.shape[1]
    padded = pad_rank(max(rank1, rank2))
    config = config or grad_config(mode, padded, dw.element_size() > 2)
    blocks = ceil_div(padded, config.ranks)
    grads = Grads(
        _like(up1, want_up), _like(down1, want_down), _like(up2, want_up), _like(down2, want_down),
        _like(scalar, want_scalar),
    )  # fmt: skip
    n_tiles = ceil_div(wide, config.block_c) if want_up else 0
    tiles = n_tiles + (ceil_div(inner, config.block_c) if want_down else 0)
    if tiles == 0 or wide * inner == 0:
        return Grads(*(None if item is None else item.zero_() for item in vars(grads).values()))
    _, chunks = chunks_for(max(wide, inner), tiles * blocks, config.block_s, dw.device)
    per_up, per_down = (ceil_div(ceil_div(side, chunks), config.block_s) * config.block_s for side in (inner, wide))
    work = rank_dtype(dw.dtype)
    precision = "tf32" if dw.element_size() == 2 else dot_precision(work)
    held = tiles * blocks * chunks * 2 * config.ranks * config.block_c if chunks > 1 else 0
    partials = n_tiles * blocks if want_scalar else 0
    parts = dw.new_empty(held + partials, dtype=torch.float32) if held + partials > 0 else None
    launch(
        merge_grad_kernel, (tiles, chunks, blocks), config.warps, config.stages,
        dw, up1, down1, up2, down2, scalar, grads.up1, grads.down1, grads.up2, grads.down2, grads.scalar,
        parts, parts[held:] if parts is not None and want_scalar else None, counter(dw.device, tiles * blocks + 1),
        wide, inner, rank1, rank2, number, n_tiles, tiles, per_up, per_down, chunks,
        *_strides(dw, up1, down1, up2, down2),
        mode, want_up, want_down, scalar is not None, want_scalar, chunks > 1, blocks == 1,
        _TL[work], precision, config.ranks, config.block_s, config.block_c,
    )  # fmt: skip
    return grads
