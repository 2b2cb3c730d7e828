"""Both factors of (B1 A1) * (B2 A2) as one low-rank product.

Forward   up[n, i q + j] = up1[n, i] up2[n, j],  down[i q + j, k] = down1[i, k] down2[j, k]
Backward  d up1[n, i] = sum_j d up[n, i q + j] up2[n, j], and the same with the roles of the sides, for up and for down

Shapes: up1 (N, p), up2 (N, q), down1 (p, K), down2 (q, K), up (N, p q), down (p q, K). Traffic: forward writes
(N + K) p q elements, backward reads them once; the factors are small beside that. One launch each: programs below
``up_tiles`` hold rows of up, the others columns of down. Backward keeps nothing but the factors and has no temporary
of p q columns. Deterministic: one program sums each element in a fixed order. Products and sums are float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import ceil_div, launch


@triton.jit
def _outer(
    a_ptr, b_ptr, out_ptr, l, L, p, q, a_l, a_i, b_l, b_j, out_l, out_c, BC: tl.constexpr
):  # fmt: skip
    """out[l, i q + j] = a[l, i] b[l, j] for the lines ``l`` and BC of the p q products."""
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    ok = (c < p * q)[:, None] & (l < L)[None, :]
    i = (c // q).to(tl.int64)
    j = (c % q).to(tl.int64)
    a = tl.load(a_ptr + i[:, None] * a_i + l[None, :] * a_l, ok, 0.0).to(tl.float32)
    b = tl.load(b_ptr + j[:, None] * b_j + l[None, :] * b_l, ok, 0.0).to(tl.float32)
    place = out_ptr + c[:, None].to(tl.int64) * out_c + l[None, :] * out_l
    tl.store(place, (a * b).to(out_ptr.dtype.element_ty), ok)


@triton.jit(do_not_specialize=["up_tiles"])
def khatri_rao_kernel(
    up1_ptr, down1_ptr, up2_ptr, down2_ptr, up_ptr, down_ptr,
    N, K, p, q, up_tiles,
    up1_rows, up1_cols, down1_rows, down1_cols, up2_rows, up2_cols, down2_rows, down2_cols,
    BC: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """BC of the p q products for BL rows of up (tiles below ``up_tiles``) or BL columns of down."""
    tile = tl.program_id(0)
    is_up = tile < up_tiles
    line = tl.where(is_up, tile, tile - up_tiles).to(tl.int64) * BL + tl.arange(0, BL)
    if is_up:
        _outer(up1_ptr, up2_ptr, up_ptr, line, N, p, q, up1_rows, up1_cols, up2_rows, up2_cols, p * q, 1, BC)
    else:
        _outer(down1_ptr, down2_ptr, down_ptr, line, K, p, q, down1_cols, down1_rows, down2_cols, down2_rows, 1, K, BC)


@triton.jit
def _inner(
    grad_ptr, a_ptr, b_ptr, da_ptr, db_ptr, l, L, p, q,
    grad_l, grad_c, a_l, a_i, b_l, b_j, da_l, da_i, db_l, db_j, Q: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """da[l, i] = sum_j grad[l, i q + j] b[l, j] and db[l, j] = sum_i grad[l, i q + j] a[l, i]; grad is read once."""
    j = tl.arange(0, Q).to(tl.int64)
    l_ok = l < L
    ok = (j < q)[:, None] & l_ok[None, :]
    b = tl.load(b_ptr + j[:, None] * b_j + l[None, :] * b_l, ok, 0.0).to(tl.float32)
    total = tl.zeros((Q, BL), tl.float32)
    for i in range(0, p):
        grad = tl.load(grad_ptr + (i * q + j)[:, None] * grad_c + l[None, :] * grad_l, ok, 0.0).to(tl.float32)
        row = l * 0 + i
        a = tl.load(a_ptr + row * a_i + l * a_l, l_ok, 0.0).to(tl.float32)
        total += grad * a[None, :]
        tl.store(da_ptr + row * da_i + l * da_l, tl.sum(grad * b, 0).to(da_ptr.dtype.element_ty), l_ok)
    tl.store(db_ptr + j[:, None] * db_j + l[None, :] * db_l, total.to(db_ptr.dtype.element_ty), ok)


@triton.jit(do_not_specialize=["up_tiles"])
def khatri_rao_grad_kernel(
    dup_ptr, ddown_ptr, up1_ptr, down1_ptr, up2_ptr, down2_ptr, dup1_ptr, ddown1_ptr, dup2_ptr, ddown2_ptr,
    N, K, p, q, up_tiles,
    dup_rows, dup_cols, ddown_rows, ddown_cols,
    up1_rows, up1_cols, down1_rows, down1_cols, up2_rows, up2_cols, down2_rows, down2_cols,
    HAS_UP: tl.constexpr, HAS_DOWN: tl.constexpr, Q: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """All four gradients for BL rows of up (tiles below ``up_tiles``) or BL columns of down."""
    tile = tl.program_id(0)
    is_up = tile < up_tiles
    line = tl.where(is_up, tile, tile - up_tiles).to(tl.int64) * BL + tl.arange(0, BL)
    if is_up:
        if HAS_UP:
            _inner(
                dup_ptr, up1_ptr, up2_ptr, dup1_ptr, dup2_ptr, line, N, p, q, dup_rows, dup_cols,
                up1_rows, up1_cols, up2_rows, up2_cols, p, 1, q, 1, Q, BL,
            )  # fmt: skip
    else:
        if HAS_DOWN:
            _inner(
                ddown_ptr, down1_ptr, down2_ptr, ddown1_ptr, ddown2_ptr, line, K, p, q, ddown_cols, ddown_rows,
                down1_cols, down1_rows, down2_cols, down2_rows, 1, K, 1, K, Q, BL,
            )  # fmt: skip


def forward(up1: Tensor, down1: Tensor, up2: Tensor, down2: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(up (N, p q) in float32, down (p q, K) in ``dtype``)."""
    (wide, p), (q, inner) = up1.shape, down2.shape
    up = up1.new_empty((wide, p * q), dtype=torch.float32)
    down = down1.new_empty((p * q, inner), dtype=dtype)
    if p * q == 0 or wide + inner == 0:
        return up, down
    block_c, block_l = 32, 64
    up_tiles = ceil_div(wide, block_l)
    launch(
        khatri_rao_kernel, (up_tiles + ceil_div(inner, block_l), ceil_div(p * q, block_c)), 4, 1,
        up1, down1, up2, down2, up, down,
        wide, inner, p, q, up_tiles,
        up1.stride(0), up1.stride(1), down1.stride(0), down1.stride(1),
        up2.stride(0), up2.stride(1), down2.stride(0), down2.stride(1),
        block_c, block_l,
    )  # fmt: skip
    return up, down


def backward(
    dup: Tensor | None, ddown: Tensor | None, up1: Tensor, down1: Tensor, up2: Tensor, down2: Tensor
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of up1, down1, up2 and down2; None for a side whose product had none."""
    (wide, p), (q, inner) = up1.shape, down2.shape
    ups = (None, None) if dup is None else (up1.new_empty(up1.shape), up2.new_empty(up2.shape))
    downs = (None, None) if ddown is None else (down1.new_empty(down1.shape), down2.new_empty(down2.shape))
    padded = max(4, 1 << (q - 1).bit_length())
    block = max(16, min(64, 2048 // padded))
    up_tiles = 0 if dup is None else ceil_div(wide, block)
    tiles = up_tiles + (0 if ddown is None else ceil_div(inner, block))
    if tiles > 0 and p * q > 0:
        launch(
            khatri_rao_grad_kernel, (tiles,), 4, 2,
            dup, ddown, up1, down1, up2, down2, ups[0], downs[0], ups[1], downs[1],
            wide, inner, p, q, up_tiles,
            *((0, 0) if dup is None else dup.stride()), *((0, 0) if ddown is None else ddown.stride()),
            up1.stride(0), up1.stride(1), down1.stride(0), down1.stride(1),
            up2.stride(0), up2.stride(1), down2.stride(0), down2.stride(1),
            dup is not None, ddown is not None, padded, block,
        )  # fmt: skip
    return ups[0], downs[0], ups[1], downs[1]
