"""Passes over one or two large tensors: per-channel scales and dense sums.

scale       y = g x + bias                                       x read once, y written once
scale_grad  dx = g dy, dv = m sum over rows of dy x              dy and x read once, dx written once
add         out = W + s D                                        W and D read once, out written once
add_grad    dD = s dout, ds = sum of dout D                      dout (and D) read once, dD written once

with g = v, or g = 1 + m v where SHIFT. Shapes: x, y, dy, dx (M, C), v and bias (C,), m and s numbers (s also a 0-d
tensor), W, D and out of any one shape, flat.

Flops: one to three an element. One launch each, nothing is recomputed. Deterministic: sums that are split over programs
are finished by the last one to arrive, in a fixed order. Everything is computed in float32 and rounded once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import ceil_div, counter, launch, processors
from .reduction import arrive_last

_WARPS = 4
_TILE = 4096
"""Elements of a tile of x."""
_BLOCK, _BLOCK_WARPS = 2048, 8
"""Elements of a flat pass, eight a thread: float32 beside 16 bits takes twice the registers of two 16-bit tensors."""
_GRAD_ROWS, _GRAD_COLS = 32, 128
_RESIDENT = 4
"""Programs of four warps a multiprocessor is given, so that loads in flight cover the memory's latency."""


@triton.jit
def _gain(v_ptr, cols, cols_ok, v_step, m, SHIFT: tl.constexpr):
    """g of some columns."""
    gain = tl.load(v_ptr + cols.to(tl.int64) * v_step, cols_ok, 0.0).to(tl.float32)
    if SHIFT:
        gain = gain * m + 1.0
    return gain


@triton.jit(do_not_specialize=["M"])
def scale_kernel(
    x_ptr, v_ptr, bias_ptr, y_ptr, M, m, C, x_rows, x_cols, v_step, bias_step,
    SHIFT: tl.constexpr, HAS_BIAS: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """One tile; y may be x."""
    tiles = tl.cdiv(C, BC)
    place = tl.program_id(0)
    cols = (place % tiles) * BC + tl.arange(0, BC)
    rm = (place // tiles).to(tl.int64) * BM + tl.arange(0, BM)
    cols_ok = cols < C
    inside = (rm < M)[:, None] & cols_ok[None, :]
    x = tl.load(x_ptr + rm[:, None] * x_rows + cols[None, :].to(tl.int64) * x_cols, inside, 0.0).to(tl.float32)
    y = x * _gain(v_ptr, cols, cols_ok, v_step, m, SHIFT)[None, :]
    if HAS_BIAS:
        y += tl.load(bias_ptr + cols.to(tl.int64) * bias_step, cols_ok, 0.0).to(tl.float32)[None, :]
    tl.store(y_ptr + rm[:, None] * C + cols[None, :], y.to(y_ptr.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["M", "per_chunk", "chunks"])
def scale_grad_kernel(
    dy_ptr, x_ptr, v_ptr, dx_ptr, dv_ptr, part_ptr, counter_ptr,
    M, per_chunk, chunks, m, C, dy_rows, dy_cols, x_rows, x_cols, v_step,
    SHIFT: tl.constexpr, WANT_X: tl.constexpr, SPLIT: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """BC columns over one chunk of rows; dx may be dy."""
    tile = tl.program_id(0)
    chunk = tl.program_id(1)
    column = tl.arange(0, BC)
    cols = tile * BC + column
    cols_ok = cols < C
    wide_cols = cols[None, :].to(tl.int64)
    if WANT_X:
        gain = _gain(v_ptr, cols, cols_ok, v_step, m, SHIFT)
    acc = tl.zeros((BM, BC), tl.float32)
    stop = tl.minimum(M, (chunk + 1) * per_chunk)
    for first in range(chunk * per_chunk, stop, BM):
        rm = first + tl.arange(0, BM)
        wide = rm.to(tl.int64)[:, None]
        inside = (rm < stop)[:, None] & cols_ok[None, :]
        dy = tl.load(dy_ptr + wide * dy_rows + wide_cols * dy_cols, inside, 0.0).to(tl.float32)
        x = tl.load(x_ptr + wide * x_rows + wide_cols * x_cols, inside, 0.0).to(tl.float32)
        acc += dy * x
        if WANT_X:
            tl.store(dx_ptr + wide * C + wide_cols, (dy * gain[None, :]).to(dx_ptr.dtype.element_ty), inside)
    total = tl.sum(acc, 0)
    if SPLIT:
        # parts: (tiles, chunks, BC)
        parts = part_ptr + tile.to(tl.int64) * chunks * BC
        tl.store(parts + chunk * BC + column, total)
        if not arrive_last(counter_ptr + tile, chunks):
            return
        acc = tl.zeros((BM, BC), tl.float32)
        for first in range(0, chunks, BM):
            other = first + tl.arange(0, BM)
            at = parts + other[:, None] * BC + column[None, :]
            acc += tl.load(at, (other < chunks)[:, None], 0.0, cache_modifier=".cg")
        total = tl.sum(acc, 0)
    tl.store(dv_ptr + cols, (total * m).to(dv_ptr.dtype.element_ty), cols_ok)


@triton.jit(do_not_specialize=["size"])
def add_kernel(
    w_ptr, d_ptr, gain_ptr, out_ptr, size, gain, TENSOR_GAIN: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """BLOCK elements of W + s D."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    w = tl.load(w_ptr + at, inside, 0.0).to(tl.float32)
    d = tl.load(d_ptr + at, inside, 0.0).to(tl.float32)
    if TENSOR_GAIN:
        d *= tl.load(gain_ptr).to(tl.float32)
    else:
        d *= gain
    tl.store(out_ptr + at, (w + d).to(out_ptr.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["size"])
def add_grad_kernel(
    g_ptr, d_ptr, gain_ptr, dd_ptr, dgain_ptr, part_ptr, counter_ptr, size, gain,
    TENSOR_GAIN: tl.constexpr, WANT_D: tl.constexpr, WANT_GAIN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK elements of s dout, and their part of the sum of dout D."""
    place = tl.program_id(0)
    at = place.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    g = tl.load(g_ptr + at, inside, 0.0).to(tl.float32)
    if WANT_D:
        if TENSOR_GAIN:
            dd = g * tl.load(gain_ptr).to(tl.float32)
        else:
            dd = g * gain
        tl.store(dd_ptr + at, dd.to(dd_ptr.dtype.element_ty), inside)
    if WANT_GAIN:
        d = tl.load(d_ptr + at, inside, 0.0).to(tl.float32)
        tl.store(part_ptr + place, tl.sum(g * d, 0))
        programs = tl.num_programs(0)
        if not arrive_last(counter_ptr, programs):
            return
        acc = tl.zeros((BLOCK,), tl.float32)
        for first in range(0, programs, BLOCK):
            other = first + tl.arange(0, BLOCK)
            acc += tl.load(part_ptr + other, other < programs, 0.0, cache_modifier=".cg")
        tl.store(dgain_ptr, tl.sum(acc, 0).to(dgain_ptr.dtype.element_ty))


def _columns(width: int) -> int:
    """Columns a tile: wide ones, while at most an eighth of the last tile's columns would be idle."""
    for block in (512, 256, 128):
        if ceil_div(width, block) * block <= width + width // 8:
            return block
    return 128 if width > 64 else 64


def scale(x: Tensor, v: Tensor, m: float, shift: bool, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """g x + bias for x (M, C), in ``out`` (contiguous, possibly x) where given."""
    rows, width = x.shape
    y = x.new_empty((rows, width)) if out is None else out
    if x.numel() == 0:
        return y
    block_c = _columns(width)
    block_m = _TILE // block_c
    launch(
        scale_kernel, (ceil_div(rows, block_m) * ceil_div(width, block_c),), _WARPS, 1,
        x, v, bias, y, rows, float(m), width, x.stride(0), x.stride(1), v.stride(0),
        0 if bias is None else bias.stride(0), shift, bias is not None, block_m, block_c,
    )  # fmt: skip
    return y


def scale_grad(
    dy: Tensor, x: Tensor, v: Tensor, m: float, shift: bool, want_x: bool, out: Tensor | None = None
) -> tuple[Tensor | None, Tensor]:
    """(dx (M, C) or None, dv (C,) in v's dtype); dx in ``out`` (contiguous, possibly dy) where given."""
    rows, width = dy.shape
    dx = (dy.new_empty((rows, width)) if out is None else out) if want_x else None
    if dy.numel() == 0:
        return dx, v.new_zeros(width)
    dv = v.new_empty(width)
    tiles = ceil_div(width, _GRAD_COLS)
    wanted = min(ceil_div(_RESIDENT * processors(dy.device), tiles), ceil_div(rows, 2 * _GRAD_ROWS))
    per_chunk = ceil_div(ceil_div(rows, wanted), _GRAD_ROWS) * _GRAD_ROWS
    chunks = ceil_div(rows, per_chunk)
    split = chunks > 1
    parts = dy.new_empty(tiles * chunks * _GRAD_COLS, dtype=torch.float32) if split else None
    launch(
        scale_grad_kernel, (tiles, chunks), _WARPS, 1,
        dy, x, v, dx, dv, parts, counter(dy.device, tiles) if split else None,
        rows, per_chunk, chunks, float(m), width, dy.stride(0), dy.stride(1), x.stride(0), x.stride(1), v.stride(0),
        shift, want_x, split, _GRAD_ROWS, _GRAD_COLS,
    )  # fmt: skip
    return dx, dv


def add(weight: Tensor, delta: Tensor, gain: float | Tensor, dtype: torch.dtype) -> Tensor:
    """W + s D in ``dtype`` for contiguous W and D of one shape."""
    out = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    size = weight.numel()
    if size == 0:
        return out
    tensor = isinstance(gain, Tensor)
    launch(
        add_kernel, (ceil_div(size, _BLOCK),), _BLOCK_WARPS, 1,
        weight, delta, gain if tensor else None, out, size, 1.0 if tensor else float(gain), tensor, _BLOCK,
    )  # fmt: skip
    return out


def add_grad(
    grad: Tensor, delta: Tensor | None, gain: float | Tensor, dtype: torch.dtype, want_d: bool, want_gain: bool
) -> tuple[Tensor | None, Tensor | None]:
    """(dD in ``dtype``, ds in s's dtype) for a contiguous gradient of the sum."""
    size = grad.numel()
    tensor = isinstance(gain, Tensor)
    dd = torch.empty(grad.shape, dtype=dtype, device=grad.device) if want_d else None
    dgain = gain.new_empty(gain.shape) if want_gain and isinstance(gain, Tensor) else None
    if size == 0:
        return dd, None if dgain is None else dgain.zero_()
    programs = ceil_div(size, _BLOCK)
    launch(
        add_grad_kernel, (programs,), _BLOCK_WARPS, 1,
        grad, delta, gain if tensor else None, dd, dgain,
        grad.new_empty(programs, dtype=torch.float32) if want_gain else None,
        counter(grad.device, 1) if want_gain else None,
        size, 1.0 if tensor else float(gain), tensor, want_d, want_gain, _BLOCK,
    )  # fmt: skip
    return dd, dgain
