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

from ..launch import ceil_div


@triton.jit(do_not_specialize=["up_tiles"])
def khatri_rao_kernel(
    up1_ptr, down1_ptr, up2_ptr, down2_ptr, up_ptr, down_ptr,
    N, K, p, q, up_tiles,
    up1_rows, up1_cols, down1_rows, down1_cols, up2_rows, up2_cols, down2_rows, down2_cols,
    BC: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """BC of the p q products for BL rows of up (tiles below ``up_tiles``) or BL columns of down."""
    tile = tl.program_id(0)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    c_ok = c < p * q
    i = c // q
    j = c % q
    if tile < up_tiles:
        n = tile.to(tl.int64) * BL + tl.arange(0, BL)
        ok = (n < N)[:, None] & c_ok[None, :]
        a = tl.load(up1_ptr + n[:, None] * up1_rows + i[None, :] * up1_cols, ok, 0.0).to(tl.float32)
        b = tl.load(up2_ptr + n[:, None] * up2_rows + j[None, :] * up2_cols, ok, 0.0).to(tl.float32)
        tl.store(up_ptr + n[:, None] * (p * q) + c[None, :], (a * b).to(up_ptr.dtype.element_ty), ok)
    else:
        k = (tile - up_tiles).to(tl.int64) * BL + tl.arange(0, BL)
        ok = c_ok[:, None] & (k < K)[None, :]
        a = tl.load(down1_ptr + i[:, None].to(tl.int64) * down1_rows + k[None, :] * down1_cols, ok, 0.0).to(tl.float32)
        b = tl.load(down2_ptr + j[:, None].to(tl.int64) * down2_rows + k[None, :] * down2_cols, ok, 0.0).to(tl.float32)
        tl.store(down_ptr + c[:, None].to(tl.int64) * K + k[None, :], (a * b).to(down_ptr.dtype.element_ty), ok)


@triton.jit(do_not_specialize=["up_tiles"])
def khatri_rao_grad_kernel(
    dup_ptr, ddown_ptr, up1_ptr, down1_ptr, up2_ptr, down2_ptr, dup1_ptr, ddown1_ptr, dup2_ptr, ddown2_ptr,
    N, K, p, q, up_tiles,
    dup_rows, dup_cols, ddown_rows, ddown_cols,
    up1_rows, up1_cols, down1_rows, down1_cols, up2_rows, up2_cols, down2_rows, down2_cols,
    Q: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """All four gradients for BL rows of up (tiles below ``up_tiles``) or BL columns of down."""
    tile = tl.program_id(0)
    j = tl.arange(0, Q)
    j_ok = j < q
    if tile < up_tiles:
        n = tile.to(tl.int64) * BL + tl.arange(0, BL)
        n_ok = n < N
        ok = n_ok[:, None] & j_ok[None, :]
        second = tl.load(up2_ptr + n[:, None] * up2_rows + j[None, :] * up2_cols, ok, 0.0).to(tl.float32)
        total = tl.zeros((BL, Q), tl.float32)
        for i in range(0, p):
            place = dup_ptr + n[:, None] * dup_rows + (i * q + j)[None, :] * dup_cols
            grad = tl.load(place, ok, 0.0).to(tl.float32)
            first = tl.load(up1_ptr + n * up1_rows + i * up1_cols, n_ok, 0.0).to(tl.float32)
            total += grad * first[:, None]
            tl.store(dup1_ptr + n * p + i, tl.sum(grad * second, 1).to(dup1_ptr.dtype.element_ty), n_ok)
        tl.store(dup2_ptr + n[:, None] * q + j[None, :], total.to(dup2_ptr.dtype.element_ty), ok)
    else:
        k = (tile - up_tiles).to(tl.int64) * BL + tl.arange(0, BL)
        k_ok = k < K
        ok = j_ok[:, None] & k_ok[None, :]
        second = tl.load(down2_ptr + j[:, None].to(tl.int64) * down2_rows + k[None, :] * down2_cols, ok, 0.0).to(tl.float32)
        total = tl.zeros((Q, BL), tl.float32)
        for i in range(0, p):
            row = (i * q + j).to(tl.int64)
            at = k * 0 + i
            grad = tl.load(ddown_ptr + row[:, None] * ddown_rows + k[None, :] * ddown_cols, ok, 0.0).to(tl.float32)
            first = tl.load(down1_ptr + at * down1_rows + k * down1_cols, k_ok, 0.0).to(tl.float32)
            total += grad * first[None, :]
            tl.store(ddown1_ptr + at * K + k, tl.sum(grad * second, 0).to(ddown1_ptr.dtype.element_ty), k_ok)
        tl.store(ddown2_ptr + j[:, None].to(tl.int64) * K + k[None, :], total.to(ddown2_ptr.dtype.element_ty), ok)


def forward(up1: Tensor, down1: Tensor, up2: Tensor, down2: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(up (N, p q), down (p q, K)) in ``dtype``."""
    (wide, p), (q, inner) = up1.shape, down2.shape
    up = up1.new_empty((wide, p * q), dtype=dtype)
    down = down1.new_empty((p * q, inner), dtype=dtype)
    if p * q == 0 or wide + inner == 0:
        return up, down
    block_c, block_l = 32, 64
    up_tiles = ceil_div(wide, block_l)
    khatri_rao_kernel[(up_tiles + ceil_div(inner, block_l), ceil_div(p * q, block_c))](
        up1, down1, up2, down2, up, down,
        wide, inner, p, q, up_tiles,
        up1.stride(0), up1.stride(1), down1.stride(0), down1.stride(1),
        up2.stride(0), up2.stride(1), down2.stride(0), down2.stride(1),
        block_c, block_l,
        num_warps=4, num_stages=1,
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
        khatri_rao_grad_kernel[(tiles,)](
            dup, ddown, up1, down1, up2, down2, ups[0], downs[0], ups[1], downs[1],
            wide, inner, p, q, up_tiles,
            *((0, 0) if dup is None else dup.stride()), *((0, 0) if ddown is None else ddown.stride()),
            up1.stride(0), up1.stride(1), down1.stride(0), down1.stride(1),
            up2.stride(0), up2.stride(1), down2.stride(0), down2.stride(1),
            padded, block,
            num_warps=4, num_stages=2,
        )  # fmt: skip
    return ups[0], downs[0], ups[1], downs[1]
