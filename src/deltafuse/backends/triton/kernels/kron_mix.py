"""Mixing over the first Kronecker axis, for a second factor so large that its product is a matrix product of its own.

Forward    C[b, i, :] = alpha sum_j w[i, j] X[b, j, :] + bias[i, :]
Backward   the same with w^T on dY, and in the same pass dw[j, i] = alpha sum over b of dY[b, j, :] T[b, i, :]

Shapes: X (M, j c), C (M, i c), bias (i c,), T (M, i c), w (i, j). i and j up to 128, or 64 beside
float16 and float32.

The sum over j is a tensor-core product with the block-diagonal matrix of w. Traffic: X (and T) read once, C written.
Launches: one each. Nothing is recomputed. Deterministic: programs keep their own sums of dw over fixed rows; the last
to finish adds them in a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import ceil_div, counter, dot_precision, launch, processors
from .kron_chain import block_diagonal, blocks_for, diagonal_sum
from .reduction import arrive_last


@triton.jit(do_not_specialize=["M", "per_program", "programs"])
def kron_mix_kernel(
    x_ptr, w_ptr, bias_ptr, t_ptr, c_ptr, dw_ptr, part_ptr, counter_ptr,
    M, i, j, c, alpha, per_program, programs,
    x_rows, x_cols, w_i, w_j,
    HAS_BIAS: tl.constexpr, WITH_GRAD: tl.constexpr, BF16: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, IP: tl.constexpr, JP: tl.constexpr, BC: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """``per_program`` rows, BM of them and BC columns at a time."""
    work: tl.constexpr = tl.bfloat16 if BF16 else tl.float32
    mix = block_diagonal(w_ptr, i, j, w_i, w_j, BM, IP, JP).to(work)
    inp = tl.arange(0, BM * JP)
    out = tl.arange(0, BM * IP)
    program = tl.program_id(0)
    begin = program * per_program
    stop = tl.minimum(M, begin + per_program)
    acc = tl.zeros((BM * JP, BM * IP), tl.float32)
    steps = tl.cdiv(c, BC)
    for step in range(0, tl.cdiv(stop - begin, BM) * steps):
        first = begin + step // steps * BM
        cols = step % steps * BC + tl.arange(0, BC)
        cols_ok = (cols < c)[None, :]
        row = first + inp // JP
        at = row.to(tl.int64) * x_rows + (inp % JP * c).to(tl.int64) * x_cols
        x = tl.load(x_ptr + at[:, None] + cols[None, :].to(tl.int64) * x_cols,
                    ((row < stop) & (inp % JP < j))[:, None] & cols_ok, 0.0).to(work)  # fmt: skip
        mixed = tl.dot(mix, x, input_precision=PRECISION) * alpha
        row = first + out // IP
        ok = ((row < stop) & (out % IP < i))[:, None] & cols_ok
        at = ((row.to(tl.int64) * i + out % IP) * c)[:, None] + cols[None, :]
        if HAS_BIAS:
            mixed += tl.load(bias_ptr + (out % IP * c)[:, None] + cols[None, :], ok, 0.0).to(tl.float32)
        tl.store(c_ptr + at, mixed.to(c_ptr.dtype.element_ty), ok)
        if WITH_GRAD:
            t = tl.load(t_ptr + at, ok, 0.0).to(work)
            acc = tl.dot(x, t.T, acc, input_precision=PRECISION)
    if WITH_GRAD:
        ri = tl.arange(0, IP)[None, :]
        rj = tl.arange(0, JP)[:, None]
        place = rj * IP + ri
        tl.store(part_ptr + program.to(tl.int64) * IP * JP + place, diagonal_sum(acc, BM, JP, IP))
        if arrive_last(counter_ptr, programs):
            total = tl.zeros((JP, IP), tl.float32)
            several = tl.arange(0, PARTS)
            for other in range(0, programs, PARTS):
                near = (other + several)[:, None, None]
                total += tl.sum(tl.load(part_ptr + near.to(tl.int64) * IP * JP + place[None, :, :],
                                        near < programs, 0.0, cache_modifier=".cg"), 0)  # fmt: skip
            tl.store(dw_ptr + rj * i + ri, (total * alpha).to(dw_ptr.dtype.element_ty), (rj < j) & (ri < i))


def mix(
    x: Tensor, w: Tensor, bias: Tensor | None, alpha: float, dtype: torch.dtype, other: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """(C (M, i c) in ``dtype``, and with ``other`` T (M, i c), contiguous, also the gradient (j, i) of w^T)."""
    rows = x.shape[0]
    i, j = w.shape
    c = x.shape[1] // j
    out = x.new_empty((rows, i * c), dtype=dtype)
    dw = None if other is None else w.new_empty((j, i))
    if rows == 0 and other is None:
        return out, None
    half = x.dtype == torch.bfloat16 or (other is not None and other.dtype == torch.bfloat16)
    blocks = blocks_for(j, i)
    simple = half and blocks.lines <= 64
    programs = max(1, min(ceil_div(rows, blocks.rows), processors(x.device) * (4 if simple else 1)))
    per_program = ceil_div(ceil_div(rows, programs), blocks.rows) * blocks.rows
    programs = max(1, ceil_div(rows, max(1, per_program)))
    side = blocks.inner * blocks.outer
    block_c = 128 if simple else 32 if half or other is None else 16
    launch(
        kron_mix_kernel, (programs,), 4 if simple else 8, 3 if simple else 2,
        x, w, bias, other, out, dw,
        None if other is None else x.new_empty(programs * side, dtype=torch.float32),
        None if other is None else counter(x.device, 1),
        rows, i, j, c, alpha, per_program, programs,
        x.stride(0), x.stride(1), w.stride(0), w.stride(1),
        bias is not None, other is not None, half, dot_precision(torch.bfloat16 if half else torch.float32),
        blocks.rows, blocks.outer, blocks.inner, block_c, max(1, 4096 // side),
    )  # fmt: skip
    return out, dw
