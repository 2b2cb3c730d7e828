"""Merging a Kronecker delta: W' = W + scale w1 (x) w2, and both factors' gradients.

W'[a k + i, b n + j] = W[...] + scale w1[a, b] w2[i, j]
dw2 = scale sum over (a, b) of w1[a, b] G[a, :, b, :], dw1[a, b] = scale sum over (i, j) of G[a, i, b, j] w2[i, j]

Shapes: w1 (l, m), w2 (k, n), a window's axes being part of n; W, W' and G (l k, m n). W' and G are float32. Traffic:
forward reads W and writes W'; backward reads G once. Flops: 2 a element forward, 4 backward. Launches: one each.
Deterministic: a backward program owns a tile of w2 and a run of w1's elements; the last program of a tile adds the
parts of dw2 in order, the last one of a run adds the parts of dw1 in a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import ceil_div, counter, launch, processors
from .reduction import arrive_last


@triton.jit
def kron_merge_kernel(
    weight_ptr, w1_ptr, w2_ptr, out_ptr,
    rows, cols, k, n, scale,
    weight_rows, weight_cols, w1_l, w1_m, w2_k, w2_n,
    HAS_WEIGHT: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """One tile of W'."""
    rr = tl.program_id(0) * BR + tl.arange(0, BR)
    rc = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = (rr < rows)[:, None] & (rc < cols)[None, :]
    w1 = tl.load(w1_ptr + (rr // k)[:, None] * w1_l + (rc // n)[None, :] * w1_m, inside, 0.0).to(tl.float32)
    w2 = tl.load(w2_ptr + (rr % k)[:, None].to(tl.int64) * w2_k + (rc % n)[None, :].to(tl.int64) * w2_n,
                 inside, 0.0).to(tl.float32)  # fmt: skip
    out = w1 * w2 * scale
    wide_r, wide_c = rr[:, None].to(tl.int64), rc[None, :].to(tl.int64)
    if HAS_WEIGHT:
        out += tl.load(weight_ptr + wide_r * weight_rows + wide_c * weight_cols, inside, 0.0).to(tl.float32)
    tl.store(out_ptr + wide_r * cols + wide_c, out, inside)


@triton.jit(do_not_specialize=["col_tiles", "tiles", "per_chunk", "chunks"])
def kron_merge_backward_kernel(
    g_ptr, w1_ptr, w2_ptr, dw1_ptr, dw2_ptr, part1_ptr, part2_ptr, counter_ptr,
    l, m, k, n, scale, col_tiles, tiles, per_chunk, chunks,
    g_rows, g_cols, w1_l, w1_m, w2_k, w2_n,
    WANT_W1: tl.constexpr, WANT_W2: tl.constexpr,
    PAIRS: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """One (BR, BC) tile of w2 against ``per_chunk`` elements of w1, PAIRS of them at a time.

    part1: (tiles, l m). part2: (chunks, k, n).
    """
    tile = tl.program_id(0)
    chunk = tl.program_id(1)
    rk = tile // col_tiles * BR + tl.arange(0, BR)
    rn = tile % col_tiles * BC + tl.arange(0, BC)
    inside = (rk < k)[:, None] & (rn < n)[None, :]
    w2_at = rk[:, None].to(tl.int64) * w2_k + rn[None, :].to(tl.int64) * w2_n
    w2 = tl.load(w2_ptr + w2_at, inside, 0.0).to(tl.float32)
    g_at = rk[:, None].to(tl.int64) * g_rows + rn[None, :].to(tl.int64) * g_cols
    pairs = l * m
    begin = chunk * per_chunk
    stop = tl.minimum(pairs, begin + per_chunk)
    acc = tl.zeros((BR, BC), tl.float32)
    for start in range(begin, stop, PAIRS):
        pair = start + tl.arange(0, PAIRS)
        ok = pair < stop
        at = (pair // m * k).to(tl.int64) * g_rows + (pair % m * n).to(tl.int64) * g_cols
        g = tl.load(g_ptr + at[:, None, None] + g_at[None, :, :], ok[:, None, None] & inside[None, :, :], 0.0)
        g = g.to(tl.float32)
        if WANT_W2:
            w1 = tl.load(w1_ptr + (pair // m) * w1_l + (pair % m) * w1_m, ok, 0.0).to(tl.float32)
            acc += tl.sum(g * w1[:, None, None], 0)
        if WANT_W1:
            share = tl.sum(tl.sum(g * w2[None, :, :], 2), 1)
            tl.store(part1_ptr + tile.to(tl.int64) * pairs + pair, share, ok)

    if WANT_W2:
        place = rk[:, None].to(tl.int64) * n + rn[None, :]
        size = k.to(tl.int64) * n
        tl.store(part2_ptr + chunk * size + place, acc, inside)
        if arrive_last(counter_ptr + tile, chunks):
            total = tl.zeros((BR, BC), tl.float32)
            for other in range(0, chunks):
                total += tl.load(part2_ptr + other * size + place, inside, 0.0, cache_modifier=".cg")
            tl.store(dw2_ptr + place, (total * scale).to(dw2_ptr.dtype.element_ty), inside)
    if WANT_W1 and arrive_last(counter_ptr + tiles + chunk, tiles):
        several = tl.arange(0, BT)
        for start in range(begin, stop, 64):
            pair = start + tl.arange(0, 64)
            sums = tl.zeros((64,), tl.float32)
            for other in range(0, tiles, BT):
                near = other + several
                sums += tl.sum(tl.load(part1_ptr + near[:, None].to(tl.int64) * pairs + pair[None, :],
                                       (near < tiles)[:, None] & (pair < stop)[None, :], 0.0,
                                       cache_modifier=".cg"), 0)  # fmt: skip
            tl.store(dw1_ptr + pair, (sums * scale).to(dw1_ptr.dtype.element_ty), pair < stop)


def merge(weight: Tensor | None, w1: Tensor, w2: Tensor, scale: float) -> Tensor:
    """W' (l k, m n) in float32 for w1 (l, m) and w2 (k, n)."""
    (outer, inner), (k, n) = w1.shape, w2.shape
    rows, cols = outer * k, inner * n
    out = w1.new_empty((rows, cols), dtype=torch.float32)
    if out.numel() == 0:
        return out
    block_r, block_c = 16, 256
    launch(
        kron_merge_kernel, (ceil_div(rows, block_r), ceil_div(cols, block_c)), 4, 1,
        weight, w1, w2, out,
        rows, cols, k, n, scale,
        *((0, 0) if weight is None else weight.stride()), *w1.stride(), *w2.stride(),
        weight is not None, block_r, block_c,
    )  # fmt: skip
    return out


def backward(
    grad: Tensor, w1: Tensor, w2: Tensor, scale: float, want_w1: bool, want_w2: bool
) -> tuple[Tensor | None, Tensor | None]:
    """(dw1 (l, m) or None, dw2 (k, n) or None) for G (l k, m n)."""
    (outer, inner), (k, n) = w1.shape, w2.shape
    dw1 = torch.empty_like(w1, memory_format=torch.contiguous_format) if want_w1 else None
    dw2 = torch.empty_like(w2, memory_format=torch.contiguous_format) if want_w2 else None
    if not (want_w1 or want_w2) or grad.numel() == 0:
        return dw1, dw2
    block_c = min(64, max(16, 1 << (n - 1).bit_length()))
    block_r = 1024 // block_c
    several = 4
    col_tiles = ceil_div(n, block_c)
    tiles, pairs = ceil_div(k, block_r) * col_tiles, outer * inner
    wanted = max(1, min(ceil_div(4 * processors(grad.device), tiles), ceil_div(pairs, several)))
    per_chunk = ceil_div(ceil_div(pairs, wanted), several) * several
    chunks = ceil_div(pairs, per_chunk)
    launch(
        kron_merge_backward_kernel, (tiles, chunks), 4, 2,
        grad, w1, w2, dw1, dw2,
        grad.new_empty(tiles * pairs, dtype=torch.float32) if want_w1 else None,
        grad.new_empty(chunks * k * n, dtype=torch.float32) if want_w2 else None,
        counter(grad.device, tiles + chunks),
        outer, inner, k, n, scale, col_tiles, tiles, per_chunk, chunks,
        *grad.stride(), *w1.stride(), *w2.stride(),
        want_w1, want_w2, several, block_r, block_c, 16,
    )  # fmt: skip
    return dw1, dw2
