"""A matrix product with the adapter's epilogue, in one launch.

y = gain (a op(b)) + s h up^T + bias

Shapes: a (M, K); b (N, K) read as b^T ("forward": y = x W^T) or b (K, N) read as it lies ("backward": dX = dY W);
gain and bias (N,); h (M, r); up (N, r) beside a forward b and (r, N) beside a backward one; y (M, N) in a's dtype.

Bytes: a, b, h and up are read and y is written, once each by count; re-reads of a and b by neighbouring tiles are meant
to hit the L2 cache, which is why tiles run in groups of rows. Flops: 2 M N (K + r), the rank rounded up to a multiple of
16. Launches: one. Nothing is recomputed and there is no workspace. Deterministic: one program sums each output element
in a fixed order, and nothing is split along K.

Precision: everything accumulates in float32 and is rounded to y's dtype once. The rank-space product runs in h's dtype;
s is multiplied into up in float32 before up is rounded to that dtype. A float32 h beside a 16-bit a costs three TF32
products, which keep float32's digits. Float32 inputs follow torch.backends.cuda.matmul.allow_tf32.

Two kernels: a persistent one that moves tiles with the Tensor Memory Accelerator (TMA, sm_90 on), and one with plain
pointers and masks for every other case: strides TMA cannot take, float32, older devices, the interpreter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # Triton before 3.4: only the pointer kernel
    TensorDescriptor = None


@dataclass(frozen=True)
class Config:
    """Tile sizes and launch options of one variant.

    group_m: rows of tiles that run together, so that they share b through L2. tma: the TMA kernel. subtile: y leaves in
    two halves, which halves its staging buffer. per_sm: programs per multiprocessor in the TMA kernel; two hide one
    another's epilogues. flatten: the loops over tiles and over K become one, so that the next tile's loads overlap this
    tile's epilogue. specialize: separate warps load and multiply.
    """

    block_m: int
    block_n: int
    block_k: int
    group_m: int = 8
    warps: int = 8
    stages: int = 3
    tma: bool = True
    subtile: bool = False
    per_sm: int = 1
    flatten: bool = False
    specialize: bool = False


@triton.jit
def _tile_of(tile, M, N, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    """Row and column of a tile when tiles are numbered down GROUP rows before they move one column on."""
    rows = tl.cdiv(M, BM)
    width = GROUP * tl.cdiv(N, BN)
    first = (tile // width) * GROUP
    height = tl.minimum(rows - first, GROUP)
    inside = tile % width
    return first + inside % height, inside // height


@triton.jit
def _load_rank(ptr, index, count, rank, r, by_index, by_rank):
    """(index, rank) block of h or up; zeros outside (count, r)."""
    where = index.to(tl.int64)[:, None] * by_index + rank.to(tl.int64)[None, :] * by_rank
    return tl.load(ptr + where, (index < count)[:, None] & (rank < r)[None, :], 0)


@triton.jit
def _load_rank_bits(ptr, index, count, rank, r, by_index, by_rank):
    """_load_rank of 16-bit values as integers.

    Reinterpreting them is left to the place of use: as floats they would move to shared memory at once and hold it
    during the main loop, where one more stage needs it.
    """
    return _load_rank(ptr.to(tl.pointer_type(tl.int16)), index, count, rank, r, by_index, by_rank)


@triton.jit
def _add_rank(acc, h, up, scale, PRECISION: tl.constexpr):
    """acc + h (scale up)^T in h's dtype."""
    return tl.dot(h, (up.to(tl.float32) * scale).to(h.dtype).T, acc, input_precision=PRECISION)


@triton.jit
def _add_ranks(
    acc, h_ptr, up_ptr, rm, rn, M, N, r, scale, h_rows, h_cols, up_n, up_r,
    PRECISION: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """acc + scale h up^T, CHUNK ranks at a time so that the factors' registers stay few."""
    # one stage: a pipelined loop would claim shared memory beside the main loop's buffers
    for first in tl.range(0, r, CHUNK, num_stages=1):
        rank = first + tl.arange(0, CHUNK)
        h = _load_rank(h_ptr, rm, M, rank, r, h_rows, h_cols)
        up = _load_rank(up_ptr, rn, N, rank, r, up_n, up_r)
        acc = _add_rank(acc, h, up, scale, PRECISION)
    return acc


@triton.jit
def gemm_epilogue_kernel(
    a_ptr, b_ptr, y_ptr, bias_ptr, gain_ptr, h_ptr, up_ptr,
    M, N, K, r, scale,
    a_rows, a_cols, b_n, b_k, y_rows, y_cols, h_rows, h_cols, up_n, up_r,
    HAS_BIAS: tl.constexpr, HAS_GAIN: tl.constexpr, HAS_RANK: tl.constexpr,
    PRECISION: tl.constexpr, RANK_PRECISION: tl.constexpr, CHUNK: tl.constexpr, EVEN_K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One tile of y per program, any strides, any sizes."""
    row, col = _tile_of(tl.program_id(0), M, N, BM, BN, GROUP)
    rm = row * BM + tl.arange(0, BM)
    rn = col * BN + tl.arange(0, BN)
    rk = tl.arange(0, BK)
    rows_ok = (rm < M)[:, None]
    cols_ok = (rn < N)[None, :]
    wide_m = rm.to(tl.int64)[:, None]
    wide_n = rn.to(tl.int64)[None, :]
    wide_k = rk.to(tl.int64)
    pa = a_ptr + wide_m * a_rows + wide_k[None, :] * a_cols
    pb = b_ptr + wide_n * b_n + wide_k[:, None] * b_k
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        if EVEN_K:
            x = tl.load(pa, rows_ok, 0.0)
            w = tl.load(pb, cols_ok, 0.0)
        else:
            x = tl.load(pa, rows_ok & (k + rk < K)[None, :], 0.0)
            w = tl.load(pb, cols_ok & (k + rk < K)[:, None], 0.0)
        acc = tl.dot(x, w, acc, input_precision=PRECISION)
        pa += BK * a_cols
        pb += BK * b_k
    if HAS_GAIN:
        acc *= tl.load(gain_ptr + rn, rn < N, 0.0).to(tl.float32)[None, :]
    if HAS_RANK:
        acc = _add_ranks(acc, h_ptr, up_ptr, rm, rn, M, N, r, scale, h_rows, h_cols, up_n, up_r, RANK_PRECISION, CHUNK)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + rn, rn < N, 0.0).to(tl.float32)[None, :]
    tl.store(y_ptr + wide_m * y_rows + wide_n * y_cols, acc.to(y_ptr.dtype.element_ty), rows_ok & cols_ok)


@triton.jit
def _store(y, tile, first_m, first_n, M, N, y_rows, y_cols, TMA_STORE: tl.constexpr):
    """One block of y, through its descriptor or, where y's strides forbid one, through pointers."""
    if TMA_STORE:
        y.store([first_m, first_n], tile.to(y.dtype))
    else:
        rm = first_m + tl.arange(0, tile.shape[0])
        rn = first_n + tl.arange(0, tile.shape[1])
        where = rm.to(tl.int64)[:, None] * y_rows + rn.to(tl.int64)[None, :] * y_cols
        tl.store(y + where, tile.to(y.dtype.element_ty), (rm < M)[:, None] & (rn < N)[None, :])


@triton.jit
def gemm_epilogue_tma_kernel(
    a, b, y, bias_ptr, gain_ptr, h_ptr, up_ptr,
    M, N, K, r, scale,
    y_rows, y_cols, h_rows, h_cols, up_n, up_r,
    TRANSPOSED_B: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_GAIN: tl.constexpr, HAS_RANK: tl.constexpr,
    RANK_PRECISION: tl.constexpr, CHUNK: tl.constexpr, EARLY: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    SUBTILE: tl.constexpr, TMA_STORE: tl.constexpr, FLATTEN: tl.constexpr, SPECIALIZE: tl.constexpr,
):  # fmt: skip
    """Every program takes each num_programs-th tile of y. a and b are descriptors, y is one where TMA_STORE."""
    tiles = tl.cdiv(M, BM) * tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=FLATTEN, warp_specialize=SPECIALIZE):
        row, col = _tile_of(tile, M, N, BM, BN, GROUP)
        first_m = row * BM
        first_n = col * BN
        rm = first_m + tl.arange(0, BM)
        rn = first_n + tl.arange(0, BN)
        # few registers when the rank is small, and the main loop hides the latency
        if EARLY:
            rank = tl.arange(0, CHUNK)
            h = _load_rank_bits(h_ptr, rm, M, rank, r, h_rows, h_cols)
            up = _load_rank(up_ptr, rn, N, rank, r, up_n, up_r)
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(0, K, BK):
            x = a.load([first_m, k])
            if TRANSPOSED_B:
                acc = tl.dot(x, b.load([first_n, k]).T, acc)
            else:
                acc = tl.dot(x, b.load([k, first_n]), acc)
        if HAS_GAIN:
            acc *= tl.load(gain_ptr + rn, rn < N, 0.0).to(tl.float32)[None, :]
        if HAS_RANK:
            if EARLY:
                acc = _add_rank(acc, h.to(h_ptr.dtype.element_ty, bitcast=True), up, scale, RANK_PRECISION)
            else:
                acc = _add_ranks(
                    acc, h_ptr, up_ptr, rm, rn, M, N, r, scale, h_rows, h_cols, up_n, up_r, RANK_PRECISION, CHUNK
                )
        if HAS_BIAS:
            acc += tl.load(bias_ptr + rn, rn < N, 0.0).to(tl.float32)[None, :]
        if SUBTILE:
            left, right = tl.split(tl.permute(tl.reshape(acc, (BM, 2, BN // 2)), (0, 2, 1)))
            _store(y, left, first_m, first_n, M, N, y_rows, y_cols, TMA_STORE)
            _store(y, right, first_m, first_n + BN // 2, M, N, y_rows, y_cols, TMA_STORE)
        else:
            _store(y, acc, first_m, first_n, M, N, y_rows, y_cols, TMA_STORE)


_HALF = (torch.bfloat16, torch.float16)
# Bytes of shared memory one program may use, by compute capability; anything unlisted gets the smallest.
_SHARED = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227, (11, 0): 227}
_POINTER = (
    Config(128, 128, 64, warps=8, stages=3, tma=False),
    Config(128, 128, 32, warps=4, stages=4, tma=False),
    Config(64, 128, 64, warps=4, stages=3, tma=False),
    Config(64, 64, 64, warps=4, stages=3, tma=False),
    Config(32, 64, 64, warps=4, stages=4, tma=False),
    Config(16, 64, 64, warps=4, stages=4, tma=False),
)
_POINTER_FP32 = (
    Config(64, 64, 32, warps=4, stages=3, tma=False),
    Config(32, 64, 32, warps=4, stages=3, tma=False),
    Config(16, 64, 32, warps=4, stages=3, tma=False),
)
_TMA = (
    Config(128, 256, 64, warps=8, stages=4, subtile=True),
    Config(128, 256, 64, warps=8, stages=3, flatten=True, subtile=True),
    Config(256, 128, 64, warps=8, stages=4, subtile=True),
    Config(128, 128, 64, warps=4, stages=3, subtile=True, per_sm=2),
    Config(128, 128, 64, warps=8, stages=4),
    Config(64, 256, 64, warps=4, stages=4, subtile=True),
    Config(64, 128, 64, warps=4, stages=4),
    Config(64, 64, 64, warps=4, stages=4),
)


def _tiles(config: Config, M: int, N: int) -> int:
    return -(-M // config.block_m) * -(-N // config.block_n)


def _rank_blocks(config: Config, r: int, wide: bool) -> tuple[int, bool]:
    """Ranks per step, and whether the factors are loaded ahead of the main loop. ``wide``: h is float32."""
    padded = max(16, 1 << (r - 1).bit_length())
    chunk = min(padded, 64)
    return chunk, padded <= 16 and not wide
