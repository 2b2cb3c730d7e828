"""A Tucker core times its down factor: one wide down factor (p, I V) for a low-rank product with the up factor.

Forward   inner[p, i, v] = sum_q mid[p, q, v] down[q, i]
Backward  d mid[p, q, v] = sum_i d inner[p, i, v] down[q, i],  d down[q, i] = sum_pv mid[p, q, v] d inner[p, i, v]

Shapes: mid (p, q, V) with V the kernel positions, down (q, I), inner (p, I, V) float32. Traffic: inner written once
forward, read twice backward; 2 p q I V flops forward, twice that backward. One launch each. Nothing is kept but the two
factors. Deterministic: one program sums each element in a fixed order. Products are float32, tf32 only where allowed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import ceil_div, dot_precision, launch


@triton.jit
def tucker_fold_kernel(
    mid_ptr, down_ptr, inner_ptr, p, q, I, V, mid_p, mid_q, mid_v, down_q, down_i,
    PRECISION: tl.constexpr, BP: tl.constexpr, BQ: tl.constexpr, BI: tl.constexpr,
):  # fmt: skip
    """BP rows of inner for BI channels at one kernel position."""
    i = tl.program_id(0).to(tl.int64) * BI + tl.arange(0, BI)
    v = tl.program_id(1).to(tl.int64)
    pp = tl.program_id(2) * BP + tl.arange(0, BP)
    acc = tl.zeros((BP, BI), tl.float32)
    for start in range(0, q, BQ):
        qq = start + tl.arange(0, BQ)
        core = tl.load(mid_ptr + pp[:, None] * mid_p + qq[None, :] * mid_q + v * mid_v,
                       (pp < p)[:, None] & (qq < q)[None, :], 0.0).to(tl.float32)  # fmt: skip
        down = tl.load(down_ptr + qq[:, None] * down_q + i[None, :] * down_i,
                       (qq < q)[:, None] & (i < I)[None, :], 0.0).to(tl.float32)  # fmt: skip
        acc = tl.dot(core, down, acc, input_precision=PRECISION)
    place = inner_ptr + (pp[:, None].to(tl.int64) * I + i[None, :]) * V + v
    tl.store(place, acc, (pp < p)[:, None] & (i < I)[None, :])


@triton.jit(do_not_specialize=["mid_tiles", "q_tiles", "i_tiles"])
def tucker_fold_grad_kernel(
    grad_ptr, mid_ptr, down_ptr, dmid_ptr, ddown_ptr, p, q, I, V, mid_tiles, q_tiles, i_tiles,
    grad_p, grad_i, grad_v, mid_p, mid_q, mid_v, down_q, down_i, HAS_MID: tl.constexpr, HAS_DOWN: tl.constexpr,
    PRECISION: tl.constexpr, BP: tl.constexpr, BQ: tl.constexpr, BI: tl.constexpr,
):  # fmt: skip
    """A (BP, BQ) tile of d mid at one kernel position (tiles below ``mid_tiles``), or a (BQ, BI) tile of d down."""
    tile = tl.program_id(0)
    if tile < mid_tiles:
        if HAS_MID:
            v = (tile % V).to(tl.int64)
            tile = tile // V
            qq = (tile % q_tiles) * BQ + tl.arange(0, BQ)
            pp = (tile // q_tiles) * BP + tl.arange(0, BP)
            acc = tl.zeros((BP, BQ), tl.float32)
            for start in range(0, I, BI):
                i = (start + tl.arange(0, BI)).to(tl.int64)
                grad = tl.load(grad_ptr + pp[:, None].to(tl.int64) * grad_p + i[None, :] * grad_i + v * grad_v,
                               (pp < p)[:, None] & (i < I)[None, :], 0.0).to(tl.float32)  # fmt: skip
                down = tl.load(down_ptr + i[:, None] * down_i + qq[None, :] * down_q,
                               (i < I)[:, None] & (qq < q)[None, :], 0.0).to(tl.float32)  # fmt: skip
                acc = tl.dot(grad, down, acc, input_precision=PRECISION)
            place = dmid_ptr + (pp[:, None].to(tl.int64) * q + qq[None, :]) * V + v
            tl.store(place, acc.to(dmid_ptr.dtype.element_ty), (pp < p)[:, None] & (qq < q)[None, :])
    else:
        if HAS_DOWN:
            tile -= mid_tiles
            i = (tile % i_tiles).to(tl.int64) * BI + tl.arange(0, BI)
            qq = (tile // i_tiles) * BQ + tl.arange(0, BQ)
            acc = tl.zeros((BQ, BI), tl.float32)
            p_blocks = tl.cdiv(p, BP)
            for step in range(0, p_blocks * V):
                pp = (step // V) * BP + tl.arange(0, BP)
                v = step % V
                core = tl.load(mid_ptr + qq[:, None] * mid_q + pp[None, :] * mid_p + v * mid_v,
                               (qq < q)[:, None] & (pp < p)[None, :], 0.0).to(tl.float32)  # fmt: skip
                grad = tl.load(grad_ptr + pp[:, None].to(tl.int64) * grad_p + i[None, :] * grad_i + v * grad_v,
                               (pp < p)[:, None] & (i < I)[None, :], 0.0).to(tl.float32)  # fmt: skip
                acc = tl.dot(core, grad, acc, input_precision=PRECISION)
            place = ddown_ptr + qq[:, None].to(tl.int64) * I + i[None, :]
            tl.store(place, acc.to(ddown_ptr.dtype.element_ty), (qq < q)[:, None] & (i < I)[None, :])


_BLOCK = 32


def forward(mid: Tensor, down: Tensor) -> Tensor:
    """inner (p, I, V) in float32 for mid (p, q, V)."""
    p, q, window = mid.shape
    inner = down.shape[1]
    out = mid.new_empty((p, inner, window), dtype=torch.float32)
    if out.numel() == 0:
        return out
    launch(
        tucker_fold_kernel, (ceil_div(inner, _BLOCK), window, ceil_div(p, _BLOCK)), 4, 2,
        mid, down, out, p, q, inner, window, *mid.stride(), *down.stride(),
        dot_precision(torch.float32), _BLOCK, _BLOCK, _BLOCK,
    )  # fmt: skip
    return out


def backward(
    grad: Tensor, mid: Tensor, down: Tensor, want_mid: bool, want_down: bool
) -> tuple[Tensor | None, Tensor | None]:
    """(d mid, d down) in the factors' own dtypes for grad (p, I, V)."""
    p, q, window = mid.shape
    inner = down.shape[1]
    dmid = mid.new_empty(mid.shape) if want_mid else None
    ddown = down.new_empty(down.shape) if want_down else None
    q_tiles, i_tiles = ceil_div(q, _BLOCK), ceil_div(inner, _BLOCK)
    mid_tiles = window * q_tiles * ceil_div(p, _BLOCK) if want_mid else 0
    tiles = mid_tiles + (q_tiles * i_tiles if want_down else 0)
    if tiles == 0:
        return dmid, ddown
    launch(
        tucker_fold_grad_kernel, (tiles,), 4, 2,
        grad, mid, down, dmid, ddown, p, q, inner, window, mid_tiles, q_tiles, i_tiles,
        *grad.stride(), *mid.stride(), *down.stride(), want_mid, want_down,
        dot_precision(torch.float32), _BLOCK, _BLOCK, _BLOCK,
    )  # fmt: skip
    return dmid, ddown
