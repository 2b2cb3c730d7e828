"""The epilogue of an adapted convolution, and its backward.

Forward   out[b, n, s] = y[b, n, s] + alpha sum_r up[n, r] h[b, r, s] + bias[n]
Backward  d h[b, r, s] = alpha sum_n up[n, r] dout[b, n, s],  d up[n, r] = alpha sum_bs dout[b, n, s] h[b, r, s]

Shapes: y, out, dout (B, N, S) with the spatial axes as one, h (B, r, S), up (N, r). Any strides; a batch axis that
continues the spatial one (channels last) is made part of it. Traffic: forward reads y and h and writes out once;
backward reads dout and h, dout once for d h and once for d up. d y is dout itself. One launch each. Flops: 2 B S N r
forward, twice that backward. Saved: h and up. Deterministic: one program sums each element in a fixed order; where rows
are split over programs, the last one to finish adds their parts in order.

Precision: sums are float32, products run in h's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import ceil_div, counter, dot_precision, launch, pad_rank, processors
from .merge import product_tile
from .reduction import arrive_last


@triton.jit(do_not_specialize=["S", "s_tiles"])
def conv_epilogue_kernel(
    y_ptr, h_ptr, up_ptr, bias_ptr, out_ptr, N, S, r, s_tiles, alpha,
    y_batch, y_n, y_s, h_batch, h_r, h_s, up_n, up_r, out_batch, out_n, out_s,
    HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr, R: tl.constexpr, BN: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """One tile of BN channels and BS positions."""
    batch = (tl.program_id(0) // s_tiles).to(tl.int64)
    n0 = tl.program_id(1).to(tl.int64) * BN
    s0 = (tl.program_id(0) % s_tiles).to(tl.int64) * BS
    n = tl.arange(0, BN)
    s = tl.arange(0, BS)
    n_ok = n < N - n0
    s_ok = s < S - s0
    acc = product_tile(
        up_ptr + n0 * up_n, h_ptr + batch * h_batch + s0 * h_s, n, s, n_ok, s_ok, r, up_n, up_r, h_r, h_s,
        h_ptr.dtype.element_ty, PRECISION, R, BN, BS,
    )  # fmt: skip
    ok = n_ok[:, None] & s_ok[None, :]
    place = y_ptr + batch * y_batch + n0 * y_n + s0 * y_s
    out = tl.load(place + n[:, None] * y_n + s[None, :] * y_s, ok, 0.0).to(tl.float32) + acc * alpha
    if HAS_BIAS:
        out += tl.load(bias_ptr + n0 + n, n_ok, 0.0).to(tl.float32)[:, None]
    place = out_ptr + batch * out_batch + n0 * out_n + s0 * out_s
    tl.store(place + n[:, None] * out_n + s[None, :] * out_s, out.to(out_ptr.dtype.element_ty), ok)


@triton.jit
def _narrow_grad(
    dout_ptr, up_ptr, dh_ptr, rr, N, S, r, batch, s0, alpha,
    dout_batch, dout_n, dout_s, up_n, up_r, dh_batch, dh_r, dh_s,
    PRECISION: tl.constexpr, R: tl.constexpr, BN: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """d h for BS positions."""
    s = tl.arange(0, BS)
    n = tl.arange(0, BN)
    s_ok = s < S - s0
    dout_ptr += batch * dout_batch + s0 * dout_s
    acc = tl.zeros((R, BS), tl.float32)
    for first in range(0, N, BN):
        n_ok = n < N - first
        dout = tl.load(dout_ptr + n[:, None] * dout_n + s[None, :] * dout_s, n_ok[:, None] & s_ok[None, :], 0.0)
        up = tl.load(up_ptr + rr[:, None] * up_r + n[None, :] * up_n, (rr < r)[:, None] & n_ok[None, :], 0.0)
        work = dh_ptr.dtype.element_ty
        acc = tl.dot(up.to(work), dout.to(work), acc, input_precision=PRECISION)
        dout_ptr += dout_n * BN
        up_ptr += up_n * BN
    place = dh_ptr + batch * dh_batch + s0 * dh_s + rr[:, None] * dh_r + s[None, :] * dh_s
    tl.store(place, (acc * alpha).to(dh_ptr.dtype.element_ty), (rr < r)[:, None] & s_ok[None, :])


@triton.jit
def _up_parts(
    dout_ptr, h_ptr, rr, n0, N, S, r, start, stop, s_tiles,
    dout_batch, dout_n, dout_s, h_batch, h_r, h_s,
    PRECISION: tl.constexpr, R: tl.constexpr, BN: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """sum of h[r, s] dout[n, s] over tiles of positions from ``start`` to ``stop``, all batches in turn."""
    n = tl.arange(0, BN)
    s = tl.arange(0, BS)
    n_ok = n < N - n0
    dout_ptr += n0 * dout_n
    acc = tl.zeros((R, BN), tl.float32)
    for step in range(start, stop):
        batch = ((start * 0 + step) // s_tiles).to(tl.int64)
        at = (step % s_tiles) * BS + s
        s_ok = at < S
        wide = at.to(tl.int64)
        h = tl.load(h_ptr + batch * h_batch + wide[:, None] * h_s + rr[None, :] * h_r,
                    s_ok[:, None] & (rr < r)[None, :], 0.0)  # fmt: skip
        dout = tl.load(dout_ptr + batch * dout_batch + wide[:, None] * dout_s + n[None, :] * dout_n,
                       s_ok[:, None] & n_ok[None, :], 0.0)  # fmt: skip
        acc = tl.dot(h.T, dout.to(h.dtype), acc, input_precision=PRECISION)
    return acc


@triton.jit(do_not_specialize=["S", "s_tiles", "up_tiles", "steps", "per_chunk", "chunks"])
def conv_epilogue_grad_kernel(
    dout_ptr, h_ptr, up_ptr, dh_ptr, dup_ptr, part_ptr, counter_ptr,
    N, S, r, alpha, s_tiles, up_tiles, steps, per_chunk, chunks,
    dout_batch, dout_n, dout_s, h_batch, h_r, h_s, dh_batch, dh_r, dh_s, up_n, up_r,
    HAS_H: tl.constexpr, HAS_UP: tl.constexpr, SPLIT: tl.constexpr,
    PRECISION: tl.constexpr, R: tl.constexpr, BN: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """R ranks of d up for BN channels over one chunk of positions (programs below ``up_tiles * chunks``), or R ranks of
    d h for BS positions."""
    program = tl.program_id(0)
    block = tl.program_id(1)
    rr = block * R + tl.arange(0, R)
    if program < up_tiles * chunks:
        if HAS_UP:
            tile = program // chunks
            chunk = program % chunks
            n0 = tile.to(tl.int64) * BN
            n = tl.arange(0, BN)
            acc = _up_parts(
                dout_ptr, h_ptr, rr, n0, N, S, r, chunk * per_chunk, tl.minimum(steps, (chunk + 1) * per_chunk),
                s_tiles, dout_batch, dout_n, dout_s, h_batch, h_r, h_s, PRECISION, R, BN, BS,
            )  # fmt: skip
            # parts: (tiles, rank blocks, chunks, R, BN)
            mine = tile * tl.num_programs(1) + block
            place = tl.arange(0, R)[:, None] * BN + n[None, :]
            last = True
            if SPLIT:
                tl.store(part_ptr + (mine.to(tl.int64) * chunks + chunk) * (R * BN) + place, acc)
                last = arrive_last(counter_ptr + mine, chunks)
                if last:
                    acc = tl.zeros((R, BN), tl.float32)
                    for other in range(0, chunks):
                        slot = part_ptr + (mine.to(tl.int64) * chunks + other) * (R * BN)
                        acc += tl.load(slot + place, cache_modifier=".cg")
            if last:
                tl.store(dup_ptr + (n0 + n)[None, :] * r + rr[:, None], (acc * alpha).to(dup_ptr.dtype.element_ty),
                         (rr < r)[:, None] & (n < N - n0)[None, :])  # fmt: skip
    else:
        if HAS_H:
            tile = program - up_tiles * chunks
            batch = (tile // s_tiles).to(tl.int64)
            s0 = (tile % s_tiles).to(tl.int64) * BS
            _narrow_grad(
                dout_ptr, up_ptr, dh_ptr, rr, N, S, r, batch, s0, alpha,
                dout_batch, dout_n, dout_s, up_n, up_r, dh_batch, dh_r, dh_s, PRECISION, R, BN, BS,
            )  # fmt: skip


@dataclass(frozen=True)
class Config:
    """block_n channels and block_s positions a tile; ranks held at a time."""

    block_n: int
    block_s: int
    ranks: int
    warps: int
    stages: int


def forward_config(padded: int, precise: bool) -> Config:
    """``precise``: three products for one, whose operands are held twice."""
    return Config(32 if precise else 64, 64 if precise else 128, min(32, padded), 4, 2)


def grad_config(padded: int, wide: bool) -> Config:
    """``wide``: float32 products, whose operands are held twice."""
    return Config(32, 32, min(64, padded), 4, 3) if wide else Config(64, 64, min(64, padded), 4, 3)


Shape = tuple[int, int]


def _merged(batch: int, positions: int, *tensors: Tensor) -> Shape:
    """(batches, positions): one batch where every tensor's batch axis continues its spatial axis."""
    joined = all(item.stride(0) == item.shape[2] * item.stride(2) for item in tensors)
    return (1, batch * positions) if joined or batch == 1 else (batch, positions)


def forward(y: Tensor, h: Tensor, up: Tensor, alpha: float, bias: Tensor | None) -> Tensor:
    """out in y's layout, for y (B, N, S) and h (B, r, S)."""
    out = torch.empty_like(y)
    if out.numel() == 0:
        return out
    rank, channels = h.shape[1], y.shape[1]
    batch, positions = _merged(y.shape[0], y.shape[2], y, h, out)
    precision = _precision(h, y)
    config = forward_config(pad_rank(rank), precision == "tf32x3")
    s_tiles = ceil_div(positions, config.block_s)
    launch(
        conv_epilogue_kernel, (batch * s_tiles, ceil_div(channels, config.block_n)), config.warps, config.stages,
        y, h, up, bias, out, channels, positions, rank, s_tiles, alpha,
        *y.stride(), *h.stride(), *up.stride(), *out.stride(),
        bias is not None, precision, config.ranks, config.block_n, config.block_s,
    )  # fmt: skip
    return out


def _precision(h: Tensor, y: Tensor) -> str:
    """float32 products beside a 16-bit result need no more than tf32."""
    return "tf32" if y.element_size() == 2 else dot_precision(h.dtype)


def backward(
    dout: Tensor, h: Tensor, up: Tensor, alpha: float, want_h: bool, want_up: bool
) -> tuple[Tensor | None, Tensor | None]:
    """(d h in h's layout, d up (N, r)) for dout (B, N, S)."""
    dh = torch.empty_like(h) if want_h else None
    dup = up.new_empty(up.shape) if want_up else None
    rank, channels = h.shape[1], up.shape[0]
    if dout.numel() == 0:
        return None if dh is None else dh.zero_(), None if dup is None else dup.zero_()
    batch, positions = _merged(dout.shape[0], dout.shape[2], dout, h, *(() if dh is None else (dh,)))
    padded = pad_rank(rank)
    config = grad_config(padded, h.dtype == torch.float32)
    blocks = ceil_div(padded, config.ranks)
    s_tiles = ceil_div(positions, config.block_s)
    steps = batch * s_tiles
    up_tiles = ceil_div(channels, config.block_n) if want_up else 0
    chunks = max(1, min(ceil_div(2 * processors(dout.device), max(1, up_tiles * blocks)), steps // 4))
    per_chunk = ceil_div(steps, chunks)
    chunks = ceil_div(steps, per_chunk)
    programs = up_tiles * chunks + (steps if want_h else 0)
    if programs == 0:
        return dh, dup
    held = up_tiles * blocks * chunks * config.ranks * config.block_n if chunks > 1 else 0
    launch(
        conv_epilogue_grad_kernel, (programs, blocks), config.warps, config.stages,
        dout, h, up, dh, dup,
        dout.new_empty(held, dtype=torch.float32) if held else None,
        counter(dout.device, up_tiles * blocks) if held else None,
        channels, positions, rank, alpha, s_tiles, up_tiles, steps, per_chunk, chunks,
        *dout.stride(), *h.stride(), *((0, 0, 0) if dh is None else dh.stride()), *up.stride(),
        want_h, want_up, chunks > 1, _precision(h, dout), config.ranks, config.block_n, config.block_s,
    )  # fmt: skip
    return dh, dup
