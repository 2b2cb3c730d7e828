"""Kronecker products with two full factors that fit on chip: (w1 (x) w2) x, forward and backward.

Forward    C = alpha w1 X w2^T + bias, one row of x as X (m, n), one row of C as (l, k)
Backward   p = alpha w1^T G and C = p w2, one row of dY as G (l, k);
           dw2 = sum over rows of p^T X, dw1 = alpha sum over rows of G (X w2^T)^T

Shapes: x (M, m n), w1 (l, m), w2 (k, n), bias (l k,), C (M, l k) or (M, m n). C is what the base product then adds
itself to. Sides up to 128.

A program keeps both factors (in backward a gradient's sum too) on chip and walks over rows; everything between x and C
stays on chip, so either contraction order moves the same bytes and w2 always comes first. Traffic: forward reads x once
and writes C; backward reads dY and x once from memory and writes C. Flops: per row 2 m k (n + l) forward, and 2 m k
(2 l + 3 n) backward, where X w2^T is recomputed. Launches: one each. Deterministic: programs keep their own sums; the
last one of a group to finish adds the group's in order, the last group adds the groups'.

Precision: products in the rank dtype (bfloat16 beside bfloat16, else float32), sums float32.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import ceil_div, counter, dot_precision, launch, processors
from .reduction import arrive_last

MAX_SIDE = 128
MAX_WIDE_SIDE = 32
"""With float32 products."""
_COUNTERS = 1024
"""Counters of one gradient's groups."""


@triton.jit
def _grid(rows, cols, row_stride, col_stride):
    return rows[:, None] * row_stride + cols[None, :] * col_stride


@triton.jit(do_not_specialize=["M"])
def kron_pair_kernel(
    x_ptr, w1_ptr, w2_ptr, bias_ptr, c_ptr,
    M, m, l, n, k, alpha,
    x_rows, x_cols, w1_l, w1_m, w2_k, w2_n,
    HAS_BIAS: tl.constexpr, BF16: tl.constexpr, PRECISION: tl.constexpr,
    MP: tl.constexpr, LP: tl.constexpr, NP: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """Every ``programs``-th row of C."""
    work: tl.constexpr = tl.bfloat16 if BF16 else tl.float32
    rm, rl, rn, rk = tl.arange(0, MP), tl.arange(0, LP), tl.arange(0, NP), tl.arange(0, KP)
    x_ok = (rm < m)[:, None] & (rn < n)[None, :]
    c_ok = (rl < l)[:, None] & (rk < k)[None, :]
    w1 = tl.load(w1_ptr + _grid(rl, rm, w1_l, w1_m), (rl < l)[:, None] & (rm < m)[None, :], 0.0).to(work)
    w2 = tl.load(w2_ptr + _grid(rn, rk, w2_n, w2_k), (rn < n)[:, None] & (rk < k)[None, :], 0.0).to(work)
    x_at = _grid((rm * n).to(tl.int64), rn.to(tl.int64), x_cols, x_cols)
    c_at = _grid(rl, rk, k, 1)
    first, programs = tl.program_id(0), tl.num_programs(0)
    for step in range(0, tl.cdiv(M - first, programs)):
        row = (first + step * programs).to(tl.int64)
        x = tl.load(x_ptr + row * x_rows + x_at, x_ok, 0.0).to(work)
        t = tl.dot(x, w2, input_precision=PRECISION).to(work)
        c = tl.dot(w1, t, input_precision=PRECISION) * alpha
        if HAS_BIAS:
            c += tl.load(bias_ptr + c_at, c_ok, 0.0).to(tl.float32)
        tl.store(c_ptr + row * l * k + c_at, c.to(c_ptr.dtype.element_ty), c_ok)


@triton.jit(do_not_specialize=["M", "group", "programs"])
def kron_pair_backward_kernel(
    dy_ptr, x_ptr, w1_ptr, w2_ptr, c_ptr, dw1_ptr, dw2_ptr, part_ptr, counter_ptr,
    M, m, l, n, k, alpha, group, programs,
    dy_rows, dy_cols, x_rows, x_cols, w1_l, w1_m, w2_k, w2_n,
    PREFILL: tl.constexpr, KINDS: tl.constexpr, COUNTERS: tl.constexpr, BF16: tl.constexpr, PRECISION: tl.constexpr,
    MP: tl.constexpr, LP: tl.constexpr, NP: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """Every ``programs``-th row: C and dw2 by even programs, dw1 by odd ones, which find dY and x in cache."""
    work: tl.constexpr = tl.bfloat16 if BF16 else tl.float32
    rm, rl, rn, rk = tl.arange(0, MP), tl.arange(0, LP), tl.arange(0, NP), tl.arange(0, KP)
    x_ok = (rm < m)[:, None] & (rn < n)[None, :]
    dy_ok = (rl < l)[:, None] & (rk < k)[None, :]
    w1_ok = (rl < l)[:, None] & (rm < m)[None, :]
    w2_ok = (rk < k)[:, None] & (rn < n)[None, :]
    w2 = tl.load(w2_ptr + _grid(rk, rn, w2_k, w2_n), w2_ok, 0.0).to(work)
    x_at = _grid((rm * n).to(tl.int64), rn.to(tl.int64), x_cols, x_cols)
    dy_at = _grid((rl * k).to(tl.int64), rk.to(tl.int64), dy_cols, dy_cols)
    program = tl.program_id(0) // KINDS
    steps = tl.cdiv(M - program, programs)
    SIZE: tl.constexpr = max(LP * MP, KP * NP)
    if tl.program_id(0) % KINDS == 0:
        w1 = tl.load(w1_ptr + _grid(rl, rm, w1_l, w1_m), w1_ok, 0.0).to(work)
        c_at = _grid(rm, rn, n, 1)
        dw2 = tl.zeros((KP, NP), tl.float32)
        for step in range(0, steps):
            row = (program + step * programs).to(tl.int64)
            dy = tl.load(dy_ptr + row * dy_rows + dy_at, dy_ok, 0.0).to(work)
            x = tl.load(x_ptr + row * x_rows + x_at, x_ok, 0.0).to(work)
            p = (tl.dot(w1.T, dy, input_precision=PRECISION) * alpha).to(work)
            if PREFILL:
                c = tl.dot(p, w2, input_precision=PRECISION)
                tl.store(c_ptr + row * m * n + c_at, c.to(c_ptr.dtype.element_ty), x_ok)
            dw2 = tl.dot(p.T, x, dw2, input_precision=PRECISION)
        dw2, last = _over_programs(dw2, _grid(rk, rn, NP, 1), part_ptr, counter_ptr, program, programs, group, SIZE)
        tl.store(dw2_ptr + _grid(rk, rn, n, 1), dw2.to(dw2_ptr.dtype.element_ty),
                 (rk < tl.where(last, k, 0))[:, None] & (rn < n)[None, :])  # fmt: skip
    else:
        dw1 = tl.zeros((LP, MP), tl.float32)
        for step in range(0, steps):
            row = (program + step * programs).to(tl.int64)
            dy = tl.load(dy_ptr + row * dy_rows + dy_at, dy_ok, 0.0).to(work)
            x = tl.load(x_ptr + row * x_rows + x_at, x_ok, 0.0).to(work)
            t = tl.dot(x, w2.T, input_precision=PRECISION).to(work)
            dw1 = tl.dot(dy, t.T, dw1, input_precision=PRECISION)
        parts = part_ptr + (programs + tl.cdiv(programs, group)).to(tl.int64) * SIZE
        dw1, last = _over_programs(dw1, _grid(rl, rm, MP, 1), parts, counter_ptr + COUNTERS, program, programs, group,
                                   SIZE)  # fmt: skip
        tl.store(dw1_ptr + _grid(rl, rm, m, 1), (dw1 * alpha).to(dw1_ptr.dtype.element_ty),
                 (rl < tl.where(last, l, 0))[:, None] & (rm < m)[None, :])  # fmt: skip


@triton.jit
def _over_programs(acc, place, part_ptr, counter_ptr, program, programs, group, SIZE: tl.constexpr):
    """(the sum of every program's ``acc``, whether this program holds it): groups in order, then their sums in order.

    parts: (programs + groups, SIZE).
    """
    mine = program // group
    first = mine * group
    members = tl.minimum(group, programs - first)
    groups = tl.cdiv(programs, group)
    heads = part_ptr + programs.to(tl.int64) * SIZE + place
    tl.store(part_ptr + program.to(tl.int64) * SIZE + place, acc)
    last = arrive_last(counter_ptr + 1 + mine, members)
    if last:
        acc = _sum_of(part_ptr + first.to(tl.int64) * SIZE + place, members, SIZE)
        tl.store(heads + mine.to(tl.int64) * SIZE, acc)
        last = arrive_last(counter_ptr, groups)
        acc = _sum_of(heads, tl.where(last, groups, 0), SIZE)
    return acc, last


@triton.jit
def _sum_of(place, count, SIZE: tl.constexpr):
    total = tl.zeros(place.shape, tl.float32)
    for other in range(0, count):
        total += tl.load(place + other * SIZE, cache_modifier=".cg")
    return total


def _pad(side: int) -> int:
    return max(16, 1 << (side - 1).bit_length())


def fits(sides: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether factors of these sides stay on chip."""
    return max(sides) <= (_most(device) if dtype == torch.bfloat16 else MAX_WIDE_SIDE)


@lru_cache(maxsize=16)
def _most(device: torch.device) -> int:
    """Before Hopper, products take their operands through registers, which leaves room for half the side."""
    hopper = device.type != "cuda" or torch.cuda.get_device_capability(device) >= (9, 0)
    return MAX_SIDE if hopper else MAX_SIDE // 2


def _warps(sides: tuple[int, ...], dtype: torch.dtype) -> int:
    return 4 if max(sides) <= 64 and dtype == torch.bfloat16 else 8


def apply(
    x: Tensor, w1: Tensor, w2: Tensor, bias: Tensor | None, alpha: float, dtype: torch.dtype, transposed: bool = False
) -> Tensor:
    """C (M, l k) in ``dtype`` for x (M, m n); with ``transposed`` both factors' transposes."""
    rows = x.shape[0]
    if transposed:
        w1, w2 = w1.t(), w2.t()
    (outer, inner), (k, n) = w1.shape, w2.shape
    c = x.new_empty((rows, outer * k), dtype=dtype)
    if rows == 0:
        return c
    padded = _pad(inner), _pad(outer), _pad(n), _pad(k)
    warps = _warps(padded, x.dtype)
    launch(
        kron_pair_kernel, (min(rows, processors(x.device) * (16 // warps)),), warps, 2,
        x, w1, w2, bias, c,
        rows, inner, outer, n, k, alpha,
        x.stride(0), x.stride(1), w1.stride(0), w1.stride(1), w2.stride(0), w2.stride(1),
        bias is not None, x.dtype == torch.bfloat16,
        dot_precision(torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float32), *padded,
    )  # fmt: skip
    return c


def backward(
    dy: Tensor, x: Tensor, w1: Tensor, w2: Tensor, alpha: float, prefill: bool, want_w1: bool
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """(C (M, m n) in x's dtype or None, dw1 (l, m) or None, dw2 (k, n)) for dY (M, l k) and x (M, m n)."""
    rows = x.shape[0]
    (outer, inner), (k, n) = w1.shape, w2.shape
    c = x.new_empty((rows, inner * n)) if prefill else None
    dw1 = torch.empty_like(w1, memory_format=torch.contiguous_format) if want_w1 else None
    dw2 = torch.empty_like(w2, memory_format=torch.contiguous_format)
    padded = _pad(inner), _pad(outer), _pad(n), _pad(k)
    warps = _warps(padded, x.dtype)
    kinds = 2 if want_w1 else 1
    programs = max(1, min(rows, processors(x.device) * (12 if warps == 4 else 8) // (warps * kinds)))
    group = math.isqrt(programs)
    slots = kinds * (programs + ceil_div(programs, group))
    launch(
        kron_pair_backward_kernel, (programs * kinds,), warps, 2 if max(padded) <= 64 else 1,
        dy, x, w1, w2, c, dw1, dw2,
        x.new_empty(slots * max(padded[0] * padded[1], padded[2] * padded[3]), dtype=torch.float32),
        counter(x.device, 2 * _COUNTERS),
        rows, inner, outer, n, k, alpha, group, programs,
        dy.stride(0), dy.stride(1), x.stride(0), x.stride(1),
        w1.stride(0), w1.stride(1), w2.stride(0), w2.stride(1),
        prefill, kinds, _COUNTERS, x.dtype == torch.bfloat16,
        dot_precision(torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float32), *padded,
    )  # fmt: skip
    return c, dw1, dw2
