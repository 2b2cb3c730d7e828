"""Norms of W + alpha B A per row or column, the DoRA gain over them, and norms of a dense weight.

Written for rows i of length J; columns are the same kernels with strides and factors swapped. near (I, r) is the factor
that has the rows (B for rows of W, A^T for columns), far (r, J) the other one. P = W far^T + alpha near G with the Gram
matrix G = far far^T is (W + alpha near far) far^T, so that

Forward    norm_i^2 = |W_i|^2 + alpha <near_i, (W far^T)_i + P_i>, gain = magnitude / norm
Backward   v = d norm / norm, d near = alpha v P, d far = alpha ((v near)^T W + alpha S far) with S = near^T (v near),
           d magnitude = d gain / norm, and d norm = -d gain magnitude / norm^2

Traffic: W read once each way, P (I, r) float32 written and read where near wants a gradient. Flops: 2 I J r each way,
twice that beside bfloat16 and three times beside others. Launches: one each way; ranks above 64 (32 before Hopper) have
G or S from one more, otherwise every program recomputes them out of factor tiles that it reads anyway. Nothing of the
weight's size is written but the dense weight's own gradient. Deterministic: a sum is made by one program, or by the
last of several in order.

Precision: sums of squares in float32. Beside bfloat16 a factor meets W, and another factor in G and S, as its high and
low halves, which keep 16 bits of it; other products are three tf32 ones, which keep all. W is exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import ceil_div, counter, launch, pad_rank, split_axis
from .gemm import device_facts
from .reduction import arrive_last

TINY: tl.constexpr = tl.constexpr(1.1754943508222875e-38)
ROOT_TINY: tl.constexpr = tl.constexpr(1.0843e-19)
"""A norm at its floor; such rows have no gradient."""


@triton.jit
def _halves(f):
    """float32 as the sum of two bfloat16."""
    high = f.to(tl.bfloat16)
    return high, (f - high.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _project(w, f, acc):
    """acc + w f for a tile of the weight and float32 f."""
    if w.dtype == tl.bfloat16:
        high, low = _halves(f)
        acc = tl.dot(w, high, acc)
        acc = tl.dot(w, low, acc)
    else:
        acc = tl.dot(w.to(tl.float32), f, acc, input_precision="tf32x3")
    return acc


@triton.jit
def _gram(f, g, acc, NARROW: tl.constexpr):
    """acc + f^T g for float32 f and g; NARROW: out of bfloat16 halves, half the time of three tf32 products."""
    if NARROW:
        f_high, f_low = _halves(f)
        g_high, g_low = _halves(g)
        acc = tl.dot(f_high.T, g_high, acc)
        acc = tl.dot(f_high.T, g_low, acc)
        acc = tl.dot(f_low.T, g_high, acc)
    else:
        acc = tl.dot(f.T, g, acc, input_precision="tf32x3")
    return acc


@triton.jit
def _times_stored(f_ptr, at, ok, f_rows, f_cols, gram_ptr, r, R: tl.constexpr, RC: tl.constexpr, B: tl.constexpr):
    """f G for B rows ``at`` of f and a stored G (r, r), RC of the inner axis a step."""
    acc = tl.zeros((B, R), tl.float32)
    rr = tl.arange(0, R)
    for c in range(0, R, RC):
        rc = c + tl.arange(0, RC)
        f = tl.load(f_ptr + at[:, None] * f_rows + rc[None, :] * f_cols, ok[:, None] & (rc < r)[None, :], 0.0)
        g = tl.load(gram_ptr + rc[:, None] * r + rr[None, :], (rc < r)[:, None] & (rr < r)[None, :], 0.0)
        acc = tl.dot(f.to(tl.float32), g, acc, input_precision="tf32x3")
    return acc


@triton.jit
def _pull(grad_ptr, norm_ptr, magnitude_ptr, at, ok, grad_step, HAS_MAGNITUDE: tl.constexpr):
    """v = d norm / norm of the rows ``at``."""
    norm = tl.load(norm_ptr + at, ok, 1.0)
    v = tl.load(grad_ptr + at * grad_step, ok, 0.0).to(tl.float32) / norm
    if HAS_MAGNITUDE:
        v = -(v / norm) * (tl.load(magnitude_ptr + at, ok, 0.0).to(tl.float32) / norm)
    return tl.where(norm > ROOT_TINY, v, 0.0)


@triton.jit
def norm_forward_kernel(
    w_ptr, near_ptr, far_ptr, magnitude_ptr, gram_ptr, norm_ptr, gain_ptr, slope_ptr, part_ptr, counter_ptr,
    I, J, r, alpha, per_split, splits, w_rows, w_cols, n_rows, n_cols, f_rows, f_cols,
    HAS_MAGNITUDE: tl.constexpr, WANT_SLOPE: tl.constexpr, OWN_GRAM: tl.constexpr, SPLIT: tl.constexpr,
    R: tl.constexpr, RC: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    """Norms, gains and P of BI rows, over one share of J."""
    tile = tl.program_id(0)
    split = tl.program_id(1)
    ri = tl.arange(0, BI)
    rr = tl.arange(0, R)
    rows = (tile * BI + ri).to(tl.int64)
    rows_ok = rows < I
    rank_ok = rr < r
    squares = tl.zeros((BI, BJ), tl.float32)
    cross = tl.zeros((BI, R), tl.float32)
    if OWN_GRAM:
        gram = tl.zeros((R, R), tl.float32)
    stop = tl.minimum(J, (split + 1) * per_split)
    for j in range(split * per_split, stop, BJ):
        cols = (j + tl.arange(0, BJ)).to(tl.int64)
        cols_ok = cols < stop
        w = tl.load(w_ptr + rows[:, None] * w_rows + cols[None, :] * w_cols, rows_ok[:, None] & cols_ok[None, :], 0.0)
        f = tl.load(far_ptr + cols[:, None] * f_cols + rr[None, :] * f_rows, cols_ok[:, None] & rank_ok[None, :], 0.0)
        f = f.to(tl.float32)
        exact = w.to(tl.float32)
        squares += exact * exact
        cross = _project(w, f, cross)
        if OWN_GRAM:
            gram = _gram(f, f, gram, w_ptr.dtype.element_ty == tl.bfloat16)
    total = tl.sum(squares, 1)
    if SPLIT:
        # parts: (tiles, splits, BI + BI R + R R)
        EACH: tl.constexpr = BI * (R + 1) + R * R if OWN_GRAM else BI * (R + 1)
        wide = BI + ri[:, None] * R + rr[None, :]
        square = BI * (R + 1) + rr[:, None] * R + rr[None, :]
        slot = part_ptr + (tile.to(tl.int64) * splits + split) * EACH
        tl.store(slot + ri, total)
        tl.store(slot + wide, cross)
        if OWN_GRAM:
            tl.store(slot + square, gram)
        if not arrive_last(counter_ptr + tile, splits):
            return
        total = tl.zeros((BI,), tl.float32)
        cross = tl.zeros((BI, R), tl.float32)
        if OWN_GRAM:
            gram = tl.zeros((R, R), tl.float32)
        for other in range(0, splits):
            slot = part_ptr + (tile.to(tl.int64) * splits + other) * EACH
            total += tl.load(slot + ri, cache_modifier=".cg")
            cross += tl.load(slot + wide, cache_modifier=".cg")
            if OWN_GRAM:
                gram += tl.load(slot + square, cache_modifier=".cg")
    inside = rows_ok[:, None] & rank_ok[None, :]
    near = tl.load(near_ptr + rows[:, None] * n_rows + rr[None, :] * n_cols, inside, 0.0).to(tl.float32)
    if OWN_GRAM:
        through = tl.dot(near, gram, input_precision="tf32x3")
    else:
        through = _times_stored(near_ptr, rows, rows_ok, n_rows, n_cols, gram_ptr, r, R, RC, BI)
    slope = cross + through * alpha
    total += tl.sum(near * (cross + slope), 1) * alpha
    norm = tl.sqrt_rn(tl.maximum(total, TINY))
    tl.store(norm_ptr + rows, norm, rows_ok)
    if HAS_MAGNITUDE:
        magnitude = tl.load(magnitude_ptr + rows, rows_ok, 0.0).to(tl.float32)
        tl.store(gain_ptr + rows, tl.div_rn(magnitude, norm), rows_ok)
    if WANT_SLOPE:
        tl.store(slope_ptr + rows[:, None] * r + rr[None, :], slope, inside)


@triton.jit
def norm_backward_kernel(
    w_ptr, near_ptr, far_ptr, magnitude_ptr, square_ptr, norm_ptr, slope_ptr, grad_ptr,
    dnear_ptr, dfar_ptr, dmagnitude_ptr, part_ptr, counter_ptr,
    I, J, r, alpha, tiles, per_chunk, chunks, grad_step, w_rows, w_cols, n_rows, n_cols, f_rows, f_cols,
    dn_rows, dn_cols, df_rows, df_cols,
    HAS_MAGNITUDE: tl.constexpr, WANT_NEAR: tl.constexpr, WANT_FAR: tl.constexpr, WANT_MAGNITUDE: tl.constexpr,
    OWN_GRAM: tl.constexpr, SPLIT: tl.constexpr,
    R: tl.constexpr, RC: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    """Programs below ``tiles * chunks``: BJ columns of d far over a chunk of rows. The others: BI rows of d near and of
    d magnitude."""
    place = tl.program_id(0)
    rr = tl.arange(0, R)
    rank_ok = rr < r
    if place >= tiles * chunks:
        here = ((place - tiles * chunks) * BI + tl.arange(0, BI)).to(tl.int64)
        here_ok = here < I
        if WANT_NEAR:
            block = here_ok[:, None] & rank_ok[None, :]
            pull = _pull(grad_ptr, norm_ptr, magnitude_ptr, here, here_ok, grad_step, HAS_MAGNITUDE)
            slope = tl.load(slope_ptr + here[:, None] * r + rr[None, :], block, 0.0)
            dnear = slope * (pull * alpha)[:, None]
            tl.store(
                dnear_ptr + here[:, None] * dn_rows + rr[None, :] * dn_cols, dnear.to(dnear_ptr.dtype.element_ty), block
            )
        if WANT_MAGNITUDE:
            grad = tl.load(grad_ptr + here * grad_step, here_ok, 0.0).to(tl.float32)
            dmagnitude = grad / tl.load(norm_ptr + here, here_ok, 1.0)
            tl.store(dmagnitude_ptr + here, dmagnitude.to(dmagnitude_ptr.dtype.element_ty), here_ok)
    elif WANT_FAR:
        tile = place % tiles
        chunk = place // tiles
        rj = tl.arange(0, BJ)
        cols = (tile * BJ + rj).to(tl.int64)
        cols_ok = cols < J
        acc = tl.zeros((BJ, R), tl.float32)
        if OWN_GRAM:
            square = tl.zeros((R, R), tl.float32)
        stop = tl.minimum(I, (chunk + 1) * per_chunk)
        for i in range(chunk * per_chunk, stop, BI):
            rows = (i + tl.arange(0, BI)).to(tl.int64)
            rows_ok = rows < stop
            w = tl.load(w_ptr + rows[None, :] * w_rows + cols[:, None] * w_cols,
                        rows_ok[None, :] & cols_ok[:, None], 0.0)  # fmt: skip
            near = tl.load(near_ptr + rows[:, None] * n_rows + rr[None, :] * n_cols,
                           rows_ok[:, None] & rank_ok[None, :], 0.0).to(tl.float32)  # fmt: skip
            v = _pull(grad_ptr, norm_ptr, magnitude_ptr, rows, rows_ok, grad_step, HAS_MAGNITUDE)
            pulled = near * v[:, None]
            acc = _project(w, pulled, acc)
            if OWN_GRAM:
                square = _gram(near, pulled, square, w_ptr.dtype.element_ty == tl.bfloat16)
        if SPLIT:
            # parts: (tiles, chunks, BJ R + R R)
            EACH: tl.constexpr = BJ * R + R * R if OWN_GRAM else BJ * R
            wide = rj[:, None] * R + rr[None, :]
            inner = BJ * R + rr[:, None] * R + rr[None, :]
            slot = part_ptr + (tile.to(tl.int64) * chunks + chunk) * EACH
            tl.store(slot + wide, acc)
            if OWN_GRAM:
                tl.store(slot + inner, square)
            if not arrive_last(counter_ptr + tile, chunks):
                return
            acc = tl.zeros((BJ, R), tl.float32)
            if OWN_GRAM:
                square = tl.zeros((R, R), tl.float32)
            for other in range(0, chunks):
                slot = part_ptr + (tile.to(tl.int64) * chunks + other) * EACH
                acc += tl.load(slot + wide, cache_modifier=".cg")
                if OWN_GRAM:
                    square += tl.load(slot + inner, cache_modifier=".cg")
        inside = cols_ok[:, None] & rank_ok[None, :]
        if OWN_GRAM:
            far = tl.load(far_ptr + cols[:, None] * f_cols + rr[None, :] * f_rows, inside, 0.0).to(tl.float32)
            through = tl.dot(far, square, input_precision="tf32x3")
        else:
            through = _times_stored(far_ptr, cols, cols_ok, f_cols, f_rows, square_ptr, r, R, RC, BJ)
        dfar = (acc + through * alpha) * alpha
        tl.store(dfar_ptr + cols[:, None] * df_cols + rr[None, :] * df_rows,
                 dfar.to(dfar_ptr.dtype.element_ty), inside)  # fmt: skip


@triton.jit
def gram_kernel(
    f_ptr, magnitude_ptr, norm_ptr, grad_ptr, gram_ptr, part_ptr, counter_ptr,
    I, r, per_split, splits, grad_step, f_rows, f_cols,
    WEIGHTED: tl.constexpr, HAS_MAGNITUDE: tl.constexpr, SPLIT: tl.constexpr, BR: tl.constexpr, BI: tl.constexpr,
):  # fmt: skip
    """One (BR, BR) block of f^T f, or of f^T (v f), for f (I, r), over one share of I."""
    tile = tl.program_id(0)
    split = tl.program_id(1)
    across = tl.cdiv(r, BR)
    rp = tl.arange(0, BR)
    left = (tile // across) * BR + rp
    right = (tile % across) * BR + rp
    acc = tl.zeros((BR, BR), tl.float32)
    stop = tl.minimum(I, (split + 1) * per_split)
    for i in range(split * per_split, stop, BI):
        rows = (i + tl.arange(0, BI)).to(tl.int64)
        ok = rows < stop
        at = f_ptr + rows[:, None] * f_rows
        f = tl.load(at + left[None, :] * f_cols, ok[:, None] & (left < r)[None, :], 0.0).to(tl.float32)
        g = tl.load(at + right[None, :] * f_cols, ok[:, None] & (right < r)[None, :], 0.0).to(tl.float32)
        if WEIGHTED:
            g *= _pull(grad_ptr, norm_ptr, magnitude_ptr, rows, ok, grad_step, HAS_MAGNITUDE)[:, None]
        acc = tl.dot(f.T, g, acc, input_precision="tf32x3")
    if SPLIT:
        flat = rp[:, None] * BR + rp[None, :]
        tl.store(part_ptr + (tile * splits + split) * BR * BR + flat, acc)
        if not arrive_last(counter_ptr + tile, splits):
            return
        acc = tl.zeros((BR, BR), tl.float32)
        for other in range(0, splits):
            acc += tl.load(part_ptr + (tile * splits + other) * BR * BR + flat, cache_modifier=".cg")
    tl.store(gram_ptr + left[:, None] * r + right[None, :], acc, (left < r)[:, None] & (right < r)[None, :])


@triton.jit
def weight_norm_kernel(
    w_ptr, norm_ptr, part_ptr, counter_ptr, I, J, S, per_split, splits, w_rows, w_outer, w_inner,
    SPLIT: tl.constexpr, BI: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    """|W_i| of BI rows over one share of J; element j of a row lies at (j // S) w_outer + (j % S) w_inner."""
    tile = tl.program_id(0)
    split = tl.program_id(1)
    ri = tl.arange(0, BI)
    rows = (tile * BI + ri).to(tl.int64)
    rows_ok = rows < I
    squares = tl.zeros((BI, BJ), tl.float32)
    stop = tl.minimum(J, (split + 1) * per_split)
    for j in range(split * per_split, stop, BJ):
        cols = j + tl.arange(0, BJ)
        at = (cols // S).to(tl.int64) * w_outer + (cols % S).to(tl.int64) * w_inner
        w = tl.load(w_ptr + rows[:, None] * w_rows + at[None, :], rows_ok[:, None] & (cols < stop)[None, :], 0.0)
        w = w.to(tl.float32)
        squares += w * w
    total = tl.sum(squares, 1)
    if SPLIT:
        tl.store(part_ptr + (tile * splits + split) * BI + ri, total)
        if not arrive_last(counter_ptr + tile, splits):
            return
        total = tl.zeros((BI,), tl.float32)
        for other in range(0, splits):
            total += tl.load(part_ptr + (tile * splits + other) * BI + ri, cache_modifier=".cg")
    tl.store(norm_ptr + rows, tl.sqrt_rn(tl.maximum(total, TINY)), rows_ok)


@triton.jit
def weight_norm_backward_kernel(
    w_ptr, norm_ptr, grad_ptr, dw_ptr, N, L, S, grad_step, w_rows, w_outer, w_inner,
    BY_ROW: tl.constexpr, BN: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """One tile of dW = d norm W / norm, W as (N, L) with L = channels S; the norm belongs to a row or to a channel."""
    rows = (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64)
    cols = tl.program_id(1) * BL + tl.arange(0, BL)
    rows_ok = rows < N
    cols_ok = cols < L
    inside = rows_ok[:, None] & cols_ok[None, :]
    channel = (cols // S).to(tl.int64)
    at = channel * w_outer + (cols % S).to(tl.int64) * w_inner
    w = tl.load(w_ptr + rows[:, None] * w_rows + at[None, :], inside, 0.0).to(tl.float32)
    if BY_ROW:
        dw = w * _pull(grad_ptr, norm_ptr, norm_ptr, rows, rows_ok, grad_step, False)[:, None]
    else:
        dw = w * _pull(grad_ptr, norm_ptr, norm_ptr, channel, cols_ok, grad_step, False)[None, :]
    tl.store(dw_ptr + rows[:, None] * L + cols[None, :], dw.to(dw_ptr.dtype.element_ty), inside)


# -- launches ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Config:
    """block_i rows or columns a program, block_j of the other axis a step, warps and pipeline stages."""

    block_i: int
    block_j: int
    warps: int
    stages: int


_NARROW = {
    16: Config(64, 64, 4, 4), 32: Config(64, 64, 8, 4), 64: Config(64, 64, 8, 3), 128: Config(32, 64, 8, 3),
    256: Config(16, 32, 8, 2),
}  # fmt: skip
_WIDE = {
    16: Config(64, 32, 4, 3), 32: Config(64, 32, 4, 3), 64: Config(64, 32, 8, 3), 128: Config(32, 32, 8, 2),
    256: Config(16, 32, 8, 2),
}  # fmt: skip
"""Padded rank -> configuration, beside 16-bit brain floats and beside anything else."""


def pass_config(rank: int, dtype: torch.dtype) -> Config:
    """One pass over W with rank-space sums; the same both ways."""
    return (_NARROW if dtype == torch.bfloat16 else _WIDE)[pad_rank(rank)]


def _own_gram(padded: int, device: torch.device) -> bool:
    """Whether a Gram matrix fits beside a program's other sums: Hopper's products leave more registers."""
    return padded <= (64 if device_facts(device)[0] >= (9, 0) else 32)


@dataclass(frozen=True)
class Sides:
    """W and its factors for one axis: sizes I and J, and the strides kernels take, in their order."""

    near: Tensor
    far: Tensor
    size: int
    length: int
    strides: tuple[int, ...]

    @staticmethod
    def of(weight: Tensor, up: Tensor, down: Tensor, axis: int) -> Sides:
        (out, inner), (w0, w1) = weight.shape, weight.stride()
        if axis == 0:
            return Sides(up, down, out, inner, (w0, w1, *up.stride(), *down.stride()))
        return Sides(down, up, inner, out, (w1, w0, down.stride(1), down.stride(0), up.stride(1), up.stride(0)))


@dataclass(frozen=True)
class Norms:
    """norm (I,), gain (I,) or None, slope P (I, r) or None."""

    norm: Tensor
    gain: Tensor | None
    slope: Tensor | None


def compose(
    weight: Tensor, up: Tensor, down: Tensor, alpha: float, magnitude: Tensor | None, axis: int, want_slope: bool,
    config: Config | None = None,
) -> Norms:  # fmt: skip
    """|W + alpha up down| for W (N, K), up (N, r), down (r, K); a contiguous magnitude makes gains of it."""
    sides = Sides.of(weight, up, down, axis)
    rank, padded = up.shape[1], pad_rank(up.shape[1])
    norm = weight.new_empty(sides.size, dtype=torch.float32)
    gain = None if magnitude is None else torch.empty_like(norm)
    slope = weight.new_empty((sides.size, rank), dtype=torch.float32) if want_slope else None
    if sides.size == 0:
        return Norms(norm, gain, slope)
    own = _own_gram(padded, weight.device)
    f_rows, f_cols = sides.strides[4:]
    square = None if own else _gram_of(sides.far, sides.length, rank, f_cols, f_rows)
    c = config or pass_config(rank, weight.dtype)
    tiles = ceil_div(sides.size, c.block_i)
    share, splits = split_axis(sides.length, c.block_j, tiles, weight.device)
    each = c.block_i * (padded + 1) + (padded * padded if own else 0)
    parts = weight.new_empty(tiles * splits * each, dtype=torch.float32) if splits > 1 else None
    launch(
        norm_forward_kernel, (tiles, splits), c.warps, c.stages,
        weight, sides.near, sides.far, magnitude, square, norm, gain, slope, parts,
        counter(weight.device, tiles) if splits > 1 else None,
        sides.size, sides.length, rank, alpha, share, splits, *sides.strides,
        magnitude is not None, want_slope, own, splits > 1, padded, 32, c.block_i, c.block_j,
    )  # fmt: skip
    return Norms(norm, gain, slope)


def _gram_of(
    f: Tensor, size: int, rank: int, f_rows: int, f_cols: int, magnitude: Tensor | None = None,
    norm: Tensor | None = None, grad: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """f^T f (r, r) for f (size, r), with the rows weighted by v where a gradient is given."""
    gram = f.new_empty((rank, rank), dtype=torch.float32)
    tiles = ceil_div(rank, 64) ** 2
    share, splits = split_axis(size, 32, tiles, f.device)
    parts = f.new_empty(tiles * splits * 64 * 64, dtype=torch.float32) if splits > 1 else None
    launch(
        gram_kernel, (tiles, splits), 8, 3,
        f, magnitude, norm, grad, gram, parts, counter(f.device, tiles) if splits > 1 else None,
        size, rank, share, splits, 0 if grad is None else grad.stride(0), f_rows, f_cols,
        grad is not None, magnitude is not None, splits > 1, 64, 32,
    )  # fmt: skip
    return gram


@dataclass(frozen=True)
class Grads:
    """Gradients of up (N, r), down (r, K) and the magnitude, in their dtypes; None where not asked for."""

    up: Tensor | None
    down: Tensor | None
    magnitude: Tensor | None


def _like(item: Tensor | None, wanted: bool) -> Tensor | None:
    return torch.empty_like(item, memory_format=torch.contiguous_format) if wanted and item is not None else None


def compose_backward(
    grad: Tensor, weight: Tensor, up: Tensor, down: Tensor, magnitude: Tensor | None, norm: Tensor,
    slope: Tensor | None, alpha: float, axis: int, want_up: bool, want_down: bool, want_magnitude: bool,
    config: Config | None = None,
) -> Grads:  # fmt: skip
    """Gradients for grad (I,) of the gains, or of the norms where there is no magnitude."""
    sides = Sides.of(weight, up, down, axis)
    rank, padded = up.shape[1], pad_rank(up.shape[1])
    found = Grads(_like(up, want_up), _like(down, want_down), _like(magnitude, want_magnitude))
    dnear, dfar = (found.up, found.down) if axis == 0 else (found.down, found.up)
    c = config or pass_config(rank, weight.dtype)
    tiles = ceil_div(sides.length, c.block_i) if dfar is not None else 0
    blocks = ceil_div(sides.size, c.block_j) if dnear is not None or found.magnitude is not None else 0
    if sides.size == 0 or tiles + blocks == 0:
        return found
    own = _own_gram(padded, weight.device)
    n_rows, n_cols = sides.strides[2:4]
    square: Any = None
    if dfar is not None and not own:
        square = _gram_of(sides.near, sides.size, rank, n_rows, n_cols, magnitude, norm, grad)
    share, chunks = split_axis(sides.size, c.block_j, max(1, tiles), weight.device)
    split = chunks > 1 and dfar is not None
    each = c.block_i * padded + (padded * padded if own else 0)
    parts = weight.new_empty(tiles * chunks * each, dtype=torch.float32) if split else None
    by_row, by_rank = (rank, 1), (1, down.shape[1])
    launch(
        norm_backward_kernel, (tiles * chunks + blocks,), c.warps, c.stages,
        weight, sides.near, sides.far, magnitude, square, norm, slope, grad, dnear, dfar, found.magnitude, parts,
        counter(weight.device, tiles) if split else None,
        sides.size, sides.length, rank, alpha, tiles, share, chunks, grad.stride(0), *sides.strides,
        *((*by_row, down.shape[1], 1) if axis == 0 else (*by_rank, *by_row[::-1])),
        magnitude is not None, dnear is not None, dfar is not None, found.magnitude is not None, own, split,
        padded, 32, c.block_j, c.block_i,
    )  # fmt: skip
    return found


def _channels(weight: Tensor) -> tuple[Tensor, int, int]:
    """A weight as (N, channels, window) or (N, channels), its window size, and the window's stride."""
    if weight.dim() == 2:
        return weight, 1, 0
    flat = weight.flatten(2)
    return flat, flat.shape[2], flat.stride(2)


def dense(weight: Tensor, axis: int) -> Tensor:
    """|W| over all axes but ``axis`` (0 or 1) for W (N, channels, *kernel)."""
    flat, window, step = _channels(weight)
    size = flat.shape[axis]
    norm = weight.new_empty(size, dtype=torch.float32)
    if size == 0:
        return norm
    rows, outer, length = flat.stride(axis), flat.stride(1 - axis), flat.shape[1 - axis] * window
    if axis == 0 and outer == window * step:  # a row is one run of memory
        window, outer, step = 1, step, 0
    narrow = axis == 0
    block_i, block_j = (16, 256) if narrow else (64, 64)
    tiles = ceil_div(size, block_i)
    share, splits = split_axis(length, block_j, tiles, weight.device)
    parts = weight.new_empty(tiles * splits * block_i, dtype=torch.float32) if splits > 1 else None
    launch(
        weight_norm_kernel, (tiles, splits), 4, 4,
        flat, norm, parts, counter(weight.device, tiles) if splits > 1 else None,
        size, length, window, share, splits, rows, outer, step, splits > 1, block_i, block_j,
    )  # fmt: skip
    return norm


def dense_backward(grad: Tensor, weight: Tensor, norm: Tensor, axis: int) -> Tensor:
    """dW in the weight's dtype and shape, contiguous."""
    dweight = torch.empty_like(weight, memory_format=torch.contiguous_format)
    if weight.numel() == 0:
        return dweight
    flat, window, step = _channels(weight)
    rows, outer, length = flat.stride(0), flat.stride(1), flat.shape[1] * window
    if axis == 0 and outer == window * step:
        window, outer, step = 1, step, 0
    launch(
        weight_norm_backward_kernel, (ceil_div(flat.shape[0], 16), ceil_div(length, 256)), 4, 1,
        flat, norm, grad, dweight, flat.shape[0], length, window, grad.stride(0), rows, outer, step, axis == 0, 16, 256,
    )  # fmt: skip
    return dweight
