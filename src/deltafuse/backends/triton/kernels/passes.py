"""Low-rank paths beside a linear layer: the passes over x and dY that are not the base product.

lowrank_down   h = mask (x A^T)
lowrank_grad   q = mask alpha (dY up_gain) B and, per block of rows, the parts of dB^T = h^T dY, in one pass over dY;
               with dropout both of dY where the forward kept its element, see kernels/dropout.py
lowrank_finish dA = q^T x in one pass over x; the parts of dB added up, and with them d gain and d up_gain

Shapes: x (M, K), dY and y (M, N), A (r, K), B (N, r), h and q (M, r), gain, up_gain and bias (N,), mask (M / rows, r).

Traffic: x and dY once each, plus the parts (16 r / BM of dY's bytes for 16-bit data), which mostly stay in L2. Flops:
2 M r K, 4 M r N and 2 M r K. One launch each. Nothing is recomputed. Deterministic: an output element is summed in a
fixed order, by one program or, where the reduction is split, by the last program to finish.

Precision: products accumulate in float32. h and q have the rank dtype: bfloat16 beside bfloat16, float32 beside float16
and float32, because a rank-space value may exceed float16's range while the result does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import (
    Ready,
    ceil_div,
    chunks_for,
    counter,
    dot_precision,
    keep,
    memo,
    pad_rank,
    rank_dtype,
    scratch,
    split_axis,
)
from ..tuning import Key, Tunable, stretched
from .dropout import MASKED_RANK, dropped, kept, row_keys, seed_keys
from .gain import gain_grad
from .reduction import arrive_last


@triton.jit(do_not_specialize=["M", "rows"])
def lowrank_down_kernel(
    x_ptr, a_ptr, mask_ptr, h_ptr, part_ptr, counter_ptr,
    M, rows, K, r, per_split, splits, x_rows, x_cols, a_rows, a_cols,
    HAS_MASK: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
    R: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """BM rows of h over one share of K."""
    tile = tl.program_id(0)
    split = tl.program_id(1)
    rm = tile * BM + tl.arange(0, BM)
    rr = tl.arange(0, R)
    rk = tl.arange(0, BK)
    wide = rm.to(tl.int64)
    rows_ok = (rm < M)[:, None]
    rank_ok = rr < r
    acc = tl.zeros((BM, R), tl.float32)
    stop = tl.minimum(K, (split + 1) * per_split)
    for k in range(split * per_split, stop, BK):
        cols_ok = (k + rk) < stop
        x = tl.load(x_ptr + wide[:, None] * x_rows + (k + rk)[None, :] * x_cols, rows_ok & cols_ok[None, :], 0.0)
        a = tl.load(a_ptr + rr[:, None] * a_rows + (k + rk)[None, :] * a_cols, rank_ok[:, None] & cols_ok[None, :], 0.0)
        acc = tl.dot(x.to(h_ptr.dtype.element_ty), a.to(h_ptr.dtype.element_ty).T, acc, input_precision=PRECISION)
    if SPLIT:
        inside = tl.arange(0, BM)[:, None] * R + rr[None, :]
        tl.store(part_ptr + (tile.to(tl.int64) * splits + split) * BM * R + inside, acc)
        if not arrive_last(counter_ptr + tile, splits):
            return
        acc = tl.zeros((BM, R), tl.float32)
        for other in range(0, splits):
            acc += tl.load(part_ptr + (tile.to(tl.int64) * splits + other) * BM * R + inside, cache_modifier=".cg")
    if HAS_MASK:
        acc *= tl.load(mask_ptr + (wide // rows)[:, None] * r + rr[None, :], rows_ok & rank_ok[None, :], 0.0)
    tl.store(h_ptr + wide[:, None] * r + rr[None, :], acc.to(h_ptr.dtype.element_ty), rows_ok & rank_ok[None, :])


@triton.jit(do_not_specialize=["M", "rows", "threshold"])
def lowrank_grad_kernel(
    dy_ptr, h_ptr, b_ptr, up_gain_ptr, mask_ptr, seed_ptr, q_ptr, db_part_ptr, q_part_ptr, counter_ptr,
    M, rows, threshold, alpha, N, r, per_split, splits, dy_rows, dy_cols, b_rows, b_cols,
    WANT_Q: tl.constexpr, WANT_B: tl.constexpr, HAS_UP_GAIN: tl.constexpr, HAS_MASK: tl.constexpr,
    DROPOUT: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
    R: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """BM rows of dY over one share of N: q of these rows, and this block's part of dB^T."""
    tile = tl.program_id(0)
    split = tl.program_id(1)
    rm = tile * BM + tl.arange(0, BM)
    rr = tl.arange(0, R)
    rn = tl.arange(0, BN)
    wide = rm.to(tl.int64)
    rows_ok = (rm < M)[:, None]
    rank_ok = rr < r
    narrow = wide[:, None] * r + rr[None, :]
    RANK = q_ptr.dtype.element_ty
    if WANT_B:
        h = tl.load(h_ptr + narrow, rows_ok & rank_ok[None, :], 0.0)
    if DROPOUT:
        first, second = seed_keys(seed_ptr)
        row, row_key = row_keys(first, second, rm)
    acc = tl.zeros((BM, R), tl.float32)
    stop = tl.minimum(N, (split + 1) * per_split)
    for n in range(split * per_split, stop, BN):
        cols = n + rn
        cols_ok = cols < stop
        inside = rows_ok & cols_ok[None, :]
        dy = tl.load(dy_ptr + wide[:, None] * dy_rows + cols[None, :].to(tl.int64) * dy_cols, inside, 0.0)
        if DROPOUT:
            dy = tl.where(kept(first, second, row, row_key, cols, threshold), dy, tl.zeros_like(dy))
        if WANT_Q:
            b = tl.load(b_ptr + cols[:, None].to(tl.int64) * b_rows + rr[None, :] * b_cols,
                        cols_ok[:, None] & rank_ok[None, :], 0.0)  # fmt: skip
            if HAS_UP_GAIN:
                b = b.to(tl.float32) * tl.load(up_gain_ptr + cols, cols_ok, 0.0).to(tl.float32)[:, None]
            acc = tl.dot(dy.to(RANK), b.to(RANK), acc, input_precision=PRECISION)
        if WANT_B:
            db = tl.dot(h.T, dy.to(RANK), input_precision=PRECISION)
            place = db_part_ptr + tile.to(tl.int64) * R * N + rr[:, None] * N + cols[None, :]
            tl.store(place, db, cols_ok[None, :])
    if not WANT_Q:
        return
    if SPLIT:
        flat = tl.arange(0, BM)[:, None] * R + rr[None, :]
        tl.store(q_part_ptr + (tile.to(tl.int64) * splits + split) * BM * R + flat, acc)
        if not arrive_last(counter_ptr + tile, splits):
            return
        acc = tl.zeros((BM, R), tl.float32)
        for other in range(0, splits):
            acc += tl.load(q_part_ptr + (tile.to(tl.int64) * splits + other) * BM * R + flat, cache_modifier=".cg")
    acc *= alpha
    if HAS_MASK:
        acc *= tl.load(mask_ptr + (wide // rows)[:, None] * r + rr[None, :], rows_ok & rank_ok[None, :], 0.0)
    tl.store(q_ptr + narrow, acc.to(RANK), rows_ok & rank_ok[None, :])


@triton.jit(do_not_specialize=["M", "tiles", "sum_tiles", "x_tiles", "per_chunk", "chunks"])
def lowrank_finish_kernel(
    x_ptr, q_ptr, b_ptr, bias_ptr, gain_ptr, up_gain_ptr, db_part_ptr, vector_part_ptr,
    da_ptr, db_ptr, dgain_ptr, dup_gain_ptr, part_ptr, counter_ptr,
    M, tiles, sum_tiles, x_tiles, per_chunk, chunks, alpha, N, K, r, x_rows, x_cols, b_rows, b_cols,
    HAS_BIAS: tl.constexpr, HAS_GAIN: tl.constexpr, SPLIT: tl.constexpr,
    PRECISION: tl.constexpr, R: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Programs below ``x_tiles * chunks``: BC columns of dA over a chunk of rows. The others: BC columns of dB^T from
    its parts."""
    place = tl.program_id(0)
    rr = tl.arange(0, R)
    rank_ok = rr < r
    acc = tl.zeros((R, BC), tl.float32)
    if place < x_tiles * chunks:
        tile = place % x_tiles
        chunk = place // x_tiles
        cols = tile * BC + tl.arange(0, BC)
        cols_ok = cols < K
        stop = tl.minimum(M, (chunk + 1) * per_chunk)
        for m in range(chunk * per_chunk, stop, BM):
            rm = m + tl.arange(0, BM)
            wide = rm.to(tl.int64)
            ok = (rm < stop)[:, None]
            q = tl.load(q_ptr + wide[:, None] * r + rr[None, :], ok & rank_ok[None, :], 0.0)
            at = wide[:, None] * x_rows + cols[None, :].to(tl.int64) * x_cols
            x = tl.load(x_ptr + at, ok & cols_ok[None, :], 0.0)
            acc = tl.dot(q.T, x.to(q.dtype), acc, input_precision=PRECISION)
        if SPLIT:
            flat = rr[:, None] * BC + tl.arange(0, BC)[None, :]
            tl.store(part_ptr + (tile.to(tl.int64) * chunks + chunk) * R * BC + flat, acc)
            if not arrive_last(counter_ptr + tile, chunks):
                return
            acc = tl.zeros((R, BC), tl.float32)
            for other in range(0, chunks):
                acc += tl.load(part_ptr + (tile.to(tl.int64) * chunks + other) * R * BC + flat, cache_modifier=".cg")
        inside = rank_ok[:, None] & cols_ok[None, :]
        tl.store(da_ptr + rr[:, None].to(tl.int64) * K + cols[None, :], acc.to(da_ptr.dtype.element_ty), inside)
    else:
        cols = (place - x_tiles * chunks) * BC + tl.arange(0, BC)
        cols_ok = cols < N
        inside = rank_ok[:, None] & cols_ok[None, :]
        with_y = tl.zeros((BC,), tl.float32)
        plain = tl.zeros((BC,), tl.float32)
        at = db_part_ptr + rr[:, None] * N + cols[None, :]
        for _ in range(0, tiles):
            acc += tl.load(at, inside, 0.0)
            at += R * N
        if HAS_GAIN:
            sums = vector_part_ptr + cols
            for _ in range(0, sum_tiles):
                with_y += tl.load(sums, cols_ok, 0.0)
                plain += tl.load(sums + N, cols_ok, 0.0)
                sums += 2 * N
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
            # a gain of exactly zero has wiped out what its gradient is made of
            tl.store(dgain_ptr + cols, tl.where(gain == 0.0, 0.0, total / gain), cols_ok)
            acc *= up_gain[None, :]
        tl.store(db_ptr + cols[None, :].to(tl.int64) * r + rr[:, None], acc.to(db_ptr.dtype.element_ty), inside)


@dataclass(frozen=True)
class Config:
    """block_m rows and block_c columns a step, warps and pipeline stages; split: programs the other axis is spread
    over, 0 for as many as fill the device."""

    block_m: int
    block_c: int
    warps: int
    stages: int
    split: int = 0


def down_config(rank: int, dtype: torch.dtype) -> Config:
    """A block of x a step large enough that the copies in flight cover the memory's latency, as far as registers hold
    the ranks: beside float16 and float32 these are float32, three products each."""
    if dtype == torch.bfloat16:
        return Config(64, 128, 8, 4) if rank <= 64 else Config(32, 64, 4, 2)
    if rank <= 64:
        return Config(64, 64, 4, 4)
    return Config(64, 64, 8, 3) if rank <= 128 else Config(32, 32, 4, 2)


def grad_config(rank: int, dtype: torch.dtype) -> Config:
    """As tall as registers allow: a part of dB is written per block of rows."""
    if dtype == torch.bfloat16:
        return Config(128, 64, 8, 3) if rank <= 32 else Config(64, 64, 8, 3) if rank <= 64 else Config(32, 32, 8, 3)
    return Config(64, 64, 8, 4) if rank <= 16 else Config(32, 32, 8, 3)


def finish_config(rank: int, dtype: torch.dtype) -> Config:
    """Columns are the parallel axis, rows the reduction."""
    if rank <= 16:
        return Config(128, 64, 8, 3)
    if rank <= 64:
        return Config(128, 64, 8, 3) if dtype == torch.bfloat16 else Config(64, 64, 4, 4)
    return Config(32, 32, 4, 3) if rank <= 128 else Config(64, 32, 8, 3)


# -- tuning: keys hold device, dtype, row bucket, then sizes, the padded rank and flags --------------------------------

Shape = tuple[int, int, int, int]
_DOWN: dict[tuple[int, bool], tuple[Shape, ...]] = {
    (16, True): ((32, 128, 4, 4), (64, 64, 4, 4), (128, 64, 4, 3), (16, 256, 4, 4), (32, 256, 4, 3), (64, 256, 8, 3)),
    (64, True): ((32, 128, 4, 4), (64, 64, 4, 4), (128, 64, 4, 3), (32, 256, 4, 3)),
    (128, True): ((32, 64, 4, 2), (64, 64, 8, 3), (32, 128, 8, 3), (16, 128, 4, 3)),
    (256, True): ((32, 64, 4, 2),),
    (16, False): ((32, 128, 4, 4), (64, 64, 4, 4), (128, 64, 4, 3)),
    (64, False): ((64, 64, 4, 4),),
    (128, False): ((64, 64, 8, 3),),
}
_GRAD: dict[tuple[int, bool], tuple[Shape, ...]] = {
    (16, True): ((64, 64, 4, 3), (64, 64, 8, 4), (64, 128, 8, 3), (128, 64, 8, 4), (128, 32, 8, 4)),
    (64, True): ((64, 64, 8, 3), (64, 32, 8, 3), (128, 32, 8, 3), (64, 64, 4, 3)),
    (128, True): ((32, 32, 8, 3), (64, 32, 8, 3), (32, 64, 8, 2)),
    (256, True): ((32, 32, 8, 3),),
    (128, False): ((32, 32, 8, 3),),
}
_FINISH: dict[tuple[int, bool], tuple[Shape, ...]] = {
    (16, True): ((64, 64, 4, 4), (32, 128, 4, 4), (128, 64, 8, 3), (128, 64, 4, 3), (64, 128, 4, 3)),
    (64, True): ((64, 64, 4, 4), (32, 128, 4, 4), (128, 64, 8, 3), (64, 128, 4, 3)),
    (128, True): ((32, 32, 4, 3), (32, 64, 8, 2), (64, 32, 8, 3)),
    (256, True): ((32, 64, 8, 2), (64, 32, 8, 3)),
    (16, False): ((64, 64, 4, 4), (32, 128, 4, 4), (128, 64, 8, 3), (64, 128, 4, 3)),
    (64, False): ((64, 64, 4, 4), (32, 128, 4, 4), (64, 128, 4, 3)),
    (128, False): ((32, 32, 4, 3), (32, 64, 8, 2), (64, 32, 8, 3)),
    (256, False): ((32, 64, 8, 2), (64, 32, 8, 3)),
}
"""(padded rank up to which, whether the rank dtype has 16 bits) -> what is worth timing: nothing that spills."""


def _among(table: dict[tuple[int, bool], tuple[Shape, ...]], rank: int, dtype: torch.dtype) -> Sequence[Config]:
    narrow = dtype == torch.bfloat16
    step = next(bound for bound in (16, 64, 128, 256) if rank <= bound)
    return [Config(*shape) for shape in table.get((step, narrow), ())]


def _down_candidates(key: Key) -> Sequence[Config]:
    return _among(_DOWN, key[4], key[1])


def _grad_candidates(key: Key) -> Sequence[Config]:
    return _among(_GRAD, key[4], key[1])


def _finish_candidates(key: Key) -> Sequence[Config]:
    return _among(_FINISH, key[5], key[1])


def _stretch_finish(args: tuple[Any, ...], rows: int) -> tuple[Any, ...]:
    """A trial's q has as many rows as its x."""
    parts, *rest = args
    return replace(parts, q=stretched(parts.q, rows)), *rest


DOWN = Tunable("lowrank_down", 1, Config, lambda key: down_config(key[4], key[1]), _down_candidates, unset=(2,))
GRAD = Tunable(
    "lowrank_grad", 1, Config, lambda key: grad_config(key[4], key[1]), _grad_candidates,
    row_args=(0, 1, 2), unset=(6,),
)  # fmt: skip
FINISH = Tunable(
    "lowrank_finish", 1, Config, lambda key: finish_config(key[5], key[1]), _finish_candidates,
    row_args=(1,), stretch=_stretch_finish,
)  # fmt: skip


_downs = memo()


def down(x: Tensor, a: Tensor, mask: Tensor | None, config: Config | None = None) -> Tensor:
    """h (M, r) in the rank dtype for x (M, K)."""
    key = (x.device, x.dtype, x.shape, x.stride(), a.dtype, a.shape, a.stride(), None if mask is None else mask.shape,
           dot_precision(rank_dtype(x.dtype)))  # fmt: skip
    ready = _downs.get(key) if config is None else None
    if ready is None:
        ready = _settle_down(x, a, mask, config)
        if config is None:
            keep(_downs, key, ready)
    start, tiles, space, dtype = ready
    h = x.new_empty((x.shape[0], a.shape[0]), dtype=dtype)
    if tiles == 0:
        return h
    if space:
        start(x, a, mask, h, scratch(x.device, space), counter(x.device, tiles))
    else:
        start(x, a, mask, h, None, None)
    return h


def _settle_down(x: Tensor, a: Tensor, mask: Tensor | None, config: Config | None) -> tuple[Any, int, int, torch.dtype]:
    rows, inner = x.shape
    rank, dtype = a.shape[0], rank_dtype(x.dtype)
    if rows == 0:
        return None, 0, 0, dtype
    padded = pad_rank(rank)
    key = (x.device, x.dtype, rows.bit_length(), inner, padded, x.stride(1) == 1)
    c = config or DOWN.config_for(key, down, (x, a, mask))
    tiles = ceil_div(rows, c.block_m)
    share, splits = split_axis(inner, c.block_c, tiles, x.device, c.split)
    start = Ready(
        lowrank_down_kernel, (tiles, splits), c.warps, c.stages,
        (rows, rows if mask is None else rows // max(1, mask.shape[0]), inner, rank, share, splits,
         x.stride(0), x.stride(1), a.stride(0), a.stride(1),
         mask is not None, splits > 1, dot_precision(dtype), padded, c.block_m, c.block_c),
    )  # fmt: skip
    return start, tiles, tiles * splits * c.block_m * padded if splits > 1 else 0, dtype


@dataclass(frozen=True)
class Parts:
    """What a pass over dY leaves: q (M, r), G (M, N) and the parts that :func:`finish` adds up."""

    q: Tensor
    g: Tensor | None
    up: Tensor | None
    vectors: Tensor | None
    tiles: int


_grads = memo()


def grad(
    dy: Tensor, y: Tensor | None, h: Tensor, b: Tensor, gain: Tensor | None, up_gain: Tensor | None,
    mask: Tensor | None, alpha: float, want_q: bool, want_b: bool, seed: Tensor | None = None, threshold: int = 0,
    config: Config | None = None,
) -> Parts:  # fmt: skip
    """One pass over dY (M, N). With a gain one more, over dY and y, and the parts of dB are always made: the gains'
    gradients need them. With a seed dY is masked for q and dB alone; its scale is alpha's matter."""
    g = sums = None
    if gain is not None:
        assert y is not None
        want_b = True
        g, sums = gain_grad(dy, y, gain)
    if seed is not None and h.shape[1] > MASKED_RANK:
        dy, seed = dropped(dy, seed, threshold), None
    gained = None if up_gain is None else up_gain.dtype
    key = (dy.device, dy.dtype, dy.shape, dy.stride(), b.dtype, b.shape, b.stride(), gained,
           None if mask is None else mask.shape, alpha, want_q, want_b, dot_precision(h.dtype),
           None if seed is None else threshold)  # fmt: skip
    ready = _grads.get(key) if config is None else None
    if ready is None:
        ready = _settle_grad((dy, y, h, b, None, up_gain, mask, alpha, want_q, want_b, seed, threshold), config)
        if config is None:
            keep(_grads, key, ready)
    start, tiles, padded, space = ready
    q = torch.empty_like(h)
    up = dy.new_empty((tiles, padded, b.shape[0]), dtype=torch.float32) if want_b else None
    if space:
        start(dy, h, b, up_gain, mask, seed, q, up, scratch(dy.device, space), counter(dy.device, tiles))
    else:
        start(dy, h, b, up_gain, mask, seed, q, up, None, None)
    return Parts(q, g, up, sums, tiles)


def _settle_grad(args: tuple[Any, ...], config: Config | None) -> tuple[Ready, int, int, int]:
    dy, _, h, b, _, up_gain, mask, alpha, want_q, want_b, seed, threshold = args
    rows, wide = dy.shape
    rank = h.shape[1]
    padded = pad_rank(rank)
    key: Key = (dy.device, dy.dtype, rows.bit_length(), wide, padded, want_q, want_b)
    key = key if seed is None else (*key, "dropout")
    c = config or GRAD.config_for(key, grad, args)
    tiles = max(1, ceil_div(rows, c.block_m))
    share, splits = split_axis(wide, c.block_c, tiles, dy.device, c.split)
    split = splits > 1 and want_q
    start = Ready(
        lowrank_grad_kernel, (tiles, splits), c.warps, c.stages,
        (rows, rows if mask is None else max(1, rows // max(1, mask.shape[0])), threshold, alpha, wide, rank,
         share, splits, dy.stride(0), dy.stride(1), b.stride(0), b.stride(1),
         want_q, want_b, up_gain is not None, mask is not None, seed is not None, split,
         dot_precision(h.dtype), padded, c.block_m, c.block_c),
    )  # fmt: skip
    return start, tiles, padded, tiles * splits * c.block_m * padded if split else 0


@dataclass(frozen=True)
class Grads:
    """Gradients of A (r, K), B (N, r), gain (N,) and up_gain (N,); None where not asked for."""

    down: Tensor | None
    up: Tensor | None
    gain: Tensor | None
    up_gain: Tensor | None


_finishes = memo()


def finish(
    parts: Parts, x: Tensor, a: Tensor, b: Tensor, bias: Tensor | None, gain: Tensor | None, up_gain: Tensor | None,
    alpha: float, want_a: bool, config: Config | None = None,
) -> Grads:  # fmt: skip
    """One pass over x (M, K) and over the parts of :func:`grad`; gradients in their leaves' dtypes."""
    want_b = parts.up is not None
    sums = parts.vectors
    vectors = None if gain is None or up_gain is None or sums is None else (gain.dtype, up_gain.dtype, sums.shape)
    key = (
        x.device, x.dtype, x.shape, x.stride(), a.dtype, a.shape, b.dtype, b.shape, b.stride(), alpha, want_a, want_b,
        parts.tiles, None if bias is None else bias.dtype, vectors, dot_precision(parts.q.dtype),
    )  # fmt: skip
    ready = _finishes.get(key) if config is None else None
    if ready is None:
        ready = _settle_finish((parts, x, a, b, bias, gain, up_gain, alpha, want_a), config)
        if config is None:
            keep(_finishes, key, ready)
    start, x_tiles, space = ready
    if start is None:
        return Grads(None, None, None, None)
    da = a.new_empty(a.shape) if want_a else None
    db = b.new_empty(b.shape) if want_b else None
    dgain = None if gain is None else torch.empty_like(gain)
    dup_gain = None if up_gain is None else torch.empty_like(up_gain)
    start(
        x, parts.q, b, bias, gain, up_gain, parts.up, sums, da, db, dgain, dup_gain,
        scratch(x.device, space) if space else None, counter(x.device, x_tiles) if space else None,
    )  # fmt: skip
    return Grads(da, db, dgain, dup_gain)


def _settle_finish(args: tuple[Any, ...], config: Config | None) -> tuple[Ready | None, int, int]:
    parts, x, _, b, bias, gain, _, alpha, want_a = args
    rows, inner = x.shape
    wide, rank = b.shape
    padded = pad_rank(rank)
    key = (x.device, x.dtype, rows.bit_length(), wide, inner, padded, want_a, parts.up is not None, gain is not None)
    c = config or FINISH.config_for(key, finish, args)
    x_tiles = ceil_div(inner, c.block_c) if want_a else 0
    n_tiles = ceil_div(wide, c.block_c) if parts.up is not None else 0
    if x_tiles + n_tiles == 0:
        return None, 0, 0
    per_chunk, chunks = chunks_for(rows, max(1, x_tiles), c.block_m, x.device)
    split = chunks > 1 and want_a
    sum_tiles = 0 if parts.vectors is None else parts.vectors.shape[0]
    start = Ready(
        lowrank_finish_kernel, (x_tiles * chunks + n_tiles,), c.warps, c.stages,
        (rows, parts.tiles, sum_tiles, x_tiles, per_chunk, chunks, alpha, wide, inner, rank,
         x.stride(0), x.stride(1), b.stride(0), b.stride(1),
         bias is not None, gain is not None, split, dot_precision(parts.q.dtype), padded, c.block_m, c.block_c),
    )  # fmt: skip
    return start, x_tiles, x_tiles * chunks * padded * c.block_c if split else 0
