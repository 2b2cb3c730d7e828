"""A matrix product with the adapter's epilogue, in one launch.

y = gain (a op(b)) + up_gain s h up^T + bias

Shapes: a (M, K); b (N, K) read as b^T ("forward": y = x W^T) or b (K, N) read as it lies ("backward": dX = dY W);
gain, up_gain and bias (N,); h (M, r); up (N, r) beside a forward b and (r, N) beside a backward one; y (M, N) in the
dtype of a.

Bytes: a, b, h and up are read and y is written once each; what neighbouring tiles read again is meant to come from the
L2 cache, which is why tiles run in groups of rows. Flops: 2 M N (K + r), r padded to a power of two of at least 16.
Launches: one. Nothing is recomputed and there is no workspace. Deterministic: one program sums each output element in a
fixed order, and nothing is split along K.

Precision: everything accumulates in float32 and is rounded to y's dtype once. The rank-space product runs in h's dtype;
s is multiplied into up in float32 before up is rounded to that dtype. A float32 h beside a 16-bit a costs three TF32
products, which keep float32's digits. Float32 inputs follow torch.backends.cuda.matmul.allow_tf32.

Two kernels: a persistent one that moves tiles with the Tensor Memory Accelerator (TMA, sm_90 on), and one with plain
pointers and masks for every other case: strides TMA cannot take, float32, older devices, the interpreter.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import Ready, Tile, ceil_div, keep, memo, pad_rank, processors

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # Triton before 3.4: only the pointer kernel
    TensorDescriptor = None  # type: ignore[assignment,misc]


Vectors = tuple[Tensor | None, ...]


@dataclass(frozen=True)
class Config:
    """Tile sizes and launch options of one variant.

    group_m: rows of tiles that run together, so that they share b through L2. tma: the TMA kernel. subtile: y leaves in
    two halves, which halves its staging buffer. per_sm: programs per multiprocessor in the TMA kernel; two hide one
    another's epilogues. flatten: the loops over tiles and over K become one, so that the next tile's loads overlap this
    tile's epilogue.
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
def _load_vector(ptr, rn, N):
    """bias or gain of one tile's columns."""
    return tl.load(ptr + rn, rn < N, 0.0).to(tl.float32)


@triton.jit
def _tf32_part(x):
    """x cut to the digits that a TF32 product reads; x less this part is exact (and NaN where x is infinite)."""
    return (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def _add_rank(acc, h, up, scale, PRECISION: tl.constexpr):
    """acc + h (scale up)^T in h's dtype; scale is a number or a column of numbers."""
    up = up.to(tl.float32) * scale
    if PRECISION == "split":
        # what Triton's own "tf32x3" computes, without its second accumulator, which spills beside a large tile
        h_high = _tf32_part(h)
        up_high = _tf32_part(up)
        acc = tl.dot(h - h_high, up_high.T, acc, input_precision="tf32")
        acc = tl.dot(h_high, (up - up_high).T, acc, input_precision="tf32")
        return tl.dot(h_high, up_high.T, acc, input_precision="tf32")
    else:
        return tl.dot(h, up.to(h.dtype).T, acc, input_precision=PRECISION)


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


@triton.jit(do_not_specialize=["M"])
def gemm_epilogue_kernel(
    a_ptr, b_ptr, y_ptr, bias_ptr, gain_ptr, up_gain_ptr, h_ptr, up_ptr,
    M, N, K, r, scale,
    a_rows, a_cols, b_n, b_k, y_rows, y_cols, h_rows, h_cols, up_n, up_r,
    HAS_BIAS: tl.constexpr, HAS_GAIN: tl.constexpr, HAS_RANK: tl.constexpr, HAS_UP_GAIN: tl.constexpr,
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
        acc *= _load_vector(gain_ptr, rn, N)[None, :]
    if HAS_RANK:
        factor = scale
        if HAS_UP_GAIN:
            factor = (_load_vector(up_gain_ptr, rn, N) * scale)[:, None]
        acc = _add_ranks(acc, h_ptr, up_ptr, rm, rn, M, N, r, factor, h_rows, h_cols, up_n, up_r, RANK_PRECISION, CHUNK)
    if HAS_BIAS:
        acc += _load_vector(bias_ptr, rn, N)[None, :]
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


@triton.jit(do_not_specialize=["M"])
def gemm_epilogue_tma_kernel(
    a_tiles, b_tiles, y_tiles, bias_ptr, gain_ptr, up_gain_ptr, h_ptr, up_ptr,
    M, N, K, r, scale,
    y_rows, y_cols, h_rows, h_cols, up_n, up_r,
    TRANSPOSED_B: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_GAIN: tl.constexpr, HAS_RANK: tl.constexpr, HAS_UP_GAIN: tl.constexpr,
    RANK_PRECISION: tl.constexpr, CHUNK: tl.constexpr, EARLY: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    SUBTILE: tl.constexpr, TMA_STORE: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """Every program takes each num_programs-th tile of y. a_tiles and b_tiles are descriptors; so is y_tiles where
    TMA_STORE."""
    tiles = tl.cdiv(M, BM) * tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=FLATTEN):
        row, col = _tile_of(tile, M, N, BM, BN, GROUP)
        first_m = row * BM
        first_n = col * BN
        rm = first_m + tl.arange(0, BM)
        rn = first_n + tl.arange(0, BN)
        # what takes few registers is loaded here, where the main loop hides the latency; in a flattened loop, values
        # held across it would make the compiler wait after each product
        if not FLATTEN:
            if HAS_GAIN:
                gain = _load_vector(gain_ptr, rn, N)
            if HAS_BIAS:
                bias = _load_vector(bias_ptr, rn, N)
        if EARLY:
            rank = tl.arange(0, CHUNK)
            h = _load_rank_bits(h_ptr, rm, M, rank, r, h_rows, h_cols)
            up = _load_rank(up_ptr, rn, N, rank, r, up_n, up_r)
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(0, K, BK):
            x = a_tiles.load([first_m, k])
            if TRANSPOSED_B:
                acc = tl.dot(x, b_tiles.load([first_n, k]).T, acc)
            else:
                acc = tl.dot(x, b_tiles.load([k, first_n]), acc)
        if HAS_GAIN:
            if FLATTEN:
                gain = _load_vector(gain_ptr, rn, N)
            acc *= gain[None, :]
        if HAS_RANK:
            factor = scale
            if HAS_UP_GAIN:
                factor = (_load_vector(up_gain_ptr, rn, N) * scale)[:, None]
            if EARLY:
                acc = _add_rank(acc, h.to(h_ptr.dtype.element_ty, bitcast=True), up, factor, RANK_PRECISION)
            else:
                acc = _add_ranks(
                    acc, h_ptr, up_ptr, rm, rn, M, N, r, factor, h_rows, h_cols, up_n, up_r, RANK_PRECISION, CHUNK
                )
        if HAS_BIAS:
            if FLATTEN:
                bias = _load_vector(bias_ptr, rn, N)
            acc += bias[None, :]
        if SUBTILE:
            left, right = tl.split(tl.permute(tl.reshape(acc, (BM, 2, BN // 2)), (0, 2, 1)))
            _store(y_tiles, left, first_m, first_n, M, N, y_rows, y_cols, TMA_STORE)
            _store(y_tiles, right, first_m, first_n + BN // 2, M, N, y_rows, y_cols, TMA_STORE)
        else:
            _store(y_tiles, acc, first_m, first_n, M, N, y_rows, y_cols, TMA_STORE)


_HALF = (torch.bfloat16, torch.float16)
# Shared memory of one multiprocessor in KiB, by compute capability; what is not listed (AMD among it) gets 64.
_SHARED = {
    (8, 0): 164, (8, 6): 100, (8, 7): 164, (8, 9): 100,
    (9, 0): 228, (10, 0): 228, (10, 3): 228, (12, 0): 100, (12, 1): 100,
}  # fmt: skip

# Candidates, each with its relative rate per element of y once every multiprocessor is busy.
_TMA: tuple[tuple[Config, float], ...] = (
    (Config(128, 256, 64, warps=8, stages=3), 1.0),
    (Config(128, 256, 64, warps=8, stages=4, subtile=True), 0.99),
    (Config(128, 256, 64, warps=8, stages=3, subtile=True, flatten=True), 0.98),
    (Config(256, 128, 64, warps=8, stages=4, subtile=True), 0.97),
    (Config(128, 128, 64, warps=4, stages=3, subtile=True, per_sm=2), 0.95),
    (Config(128, 128, 64, warps=8, stages=4), 0.85),
    (Config(64, 256, 64, warps=4, stages=4, subtile=True), 0.8),
    (Config(64, 128, 64, warps=4, stages=4), 0.65),
    (Config(64, 64, 64, warps=4, stages=4), 0.45),
)
_POINTER: tuple[tuple[Config, float], ...] = (
    (Config(128, 128, 64, warps=8, stages=3, tma=False), 1.0),
    (Config(128, 128, 32, warps=8, stages=4, tma=False), 0.97),
    (Config(64, 128, 64, warps=4, stages=3, tma=False), 0.85),
    (Config(64, 64, 64, warps=4, stages=3, tma=False), 0.65),
    (Config(32, 64, 64, warps=4, stages=4, tma=False), 0.45),
    (Config(16, 64, 64, warps=4, stages=4, tma=False), 0.3),
)
_POINTER_FP32: tuple[tuple[Config, float], ...] = (
    (Config(64, 64, 32, warps=4, stages=3, tma=False), 1.0),
    (Config(32, 64, 32, warps=4, stages=3, tma=False), 0.7),
    (Config(16, 64, 32, warps=4, stages=3, tma=False), 0.4),
)


def _shared_bytes(config: Config, itemsize: int) -> int:
    """Shared memory of one program: the operands' stages and, in the TMA kernel, y's staging buffer."""
    operands = config.stages * (config.block_m + config.block_n) * config.block_k * itemsize
    if not config.tma:
        return operands
    return operands + config.block_m * config.block_n * itemsize // (2 if config.subtile else 1)


def _fits(config: Config, itemsize: int, capability: tuple[int, int]) -> bool:
    # each program also pays 1 KiB to the driver
    return config.per_sm * (_shared_bytes(config, itemsize) + 1024) <= _SHARED.get(capability, 64) * 1024


def _has_tma(capability: tuple[int, int]) -> bool:
    return TensorDescriptor is not None and capability[0] in (9, 10)


def _rated(
    N: int, K: int, dtype: torch.dtype, capability: tuple[int, int], tma: bool | None
) -> list[tuple[Config, float]]:
    """Legal candidates and their rates. ``tma`` None: where sizes permit it, strides taken to be those of row-major."""
    if tma is None:
        tma = N % 8 == 0 and K % 8 == 0
    if tma and dtype in _HALF and _has_tma(capability):
        table = _TMA
    else:
        table = _POINTER if dtype in _HALF else _POINTER_FP32
    return [pair for pair in table if _fits(pair[0], dtype.itemsize, capability)]


def configs(
    M: int, N: int, K: int, dtype: torch.dtype, device_capability: tuple[int, int], tma: bool | None = None
) -> list[Config]:
    """Legal candidates for one problem, those of far too many rows left out."""
    rated = _rated(N, K, dtype, device_capability, tma)
    return [config for config, _ in rated if config.block_m <= max(2 * M, 64)]


@lru_cache(maxsize=4096)
def default_config(
    M: int,
    N: int,
    K: int,
    dtype: torch.dtype,
    device_capability: tuple[int, int],
    tma: bool | None = None,
    multiprocessors: int = 132,
    crowded: bool = False,
) -> Config:
    """The candidate whose tiles, in whole rounds over the multiprocessors, should finish first. ``crowded``: factors
    in float32, or of a rank whose rows do not start on whole vectors, need registers the widest tile does not leave."""

    def rounds(pair: tuple[Config, float]) -> float:
        config, rate = pair
        tiles = ceil_div(M, config.block_m) * ceil_div(N, config.block_n)
        return ceil_div(tiles, multiprocessors) * config.block_m * config.block_n / rate

    rated = _rated(N, K, dtype, device_capability, tma)
    return min([pair for pair in rated if pair[0].subtile] or rated if crowded else rated, key=rounds)[0]


def _rank_blocks(config: Config, r: int, h_itemsize: int) -> tuple[int, bool]:
    """Ranks per step, and whether the factors are loaded ahead of the main loop."""
    # 32 registers a thread for the longer factor is what a full accumulator leaves; splitting float32 takes more
    fitting = (32 if h_itemsize == 2 else 8) * 32 * config.warps // max(config.block_m, config.block_n)
    chunk = max(16, min(pad_rank(max(1, r)), fitting, 64)) if r % 16 == 0 else 16
    early = 0 < r <= 16 and h_itemsize == 2 and not config.flatten
    return chunk, early


@lru_cache(maxsize=16)
def device_facts(device: torch.device) -> tuple[tuple[int, int], int]:
    """Compute capability, (0, 0) where there is none (AMD, the interpreter), and multiprocessors."""
    nvidia = device.type == "cuda" and torch.version.hip is None
    return torch.cuda.get_device_capability(device) if nvidia else (0, 0), processors(device)


def _takes_tma(t: Tensor) -> bool:
    """Whether a descriptor can address t: unit columns, rows of whole 16-byte units, an aligned start."""
    rows, cols = t.stride()
    return (
        t.dtype in _HALF
        and cols == 1
        and rows >= t.shape[1]
        and rows % 8 == 0
        and t.data_ptr() % 16 == 0
        and t.numel() > 0
    )


def _strides(t: Tensor | None, swapped: bool = False) -> tuple[int, int]:
    """Of rows and columns, or of columns and rows; of an absent tensor, anything."""
    if t is None:
        return 0, 1
    first, second = t.stride()
    return (second, first) if swapped else (first, second)


def _rank_precision(a: Tensor, h: Tensor | None, base: str) -> str:
    return "split" if h is not None and h.dtype == torch.float32 and a.dtype != torch.float32 else base


def _halves(config: Config) -> int:
    return 2 if config.subtile else 1


@dataclass(frozen=True)
class _Settled:
    """One product's launch, and the blocks its descriptors have where it uses any (y's only where y takes one)."""

    start: Ready
    blocks: tuple[tuple[int, int], tuple[int, int], tuple[int, int] | None] | None


def _settle_tma(
    operands: tuple[Tensor, Tensor, Tensor], numbers: tuple[Any, ...], rank_strides: tuple[int, ...],
    transposed_b: bool, config: Config, sms: int, flags: tuple[Any, ...], chunk: int, early: bool,
) -> _Settled:  # fmt: skip
    _, _, y = operands
    block_m, block_n, block_k = config.block_m, config.block_n, config.block_k
    stored = _takes_tma(y)
    tiles = ceil_div(y.shape[0], block_m) * ceil_div(y.shape[1], block_n)
    start = Ready(
        gemm_epilogue_tma_kernel, (min(tiles, sms * config.per_sm),), config.warps, config.stages,
        (*numbers, *y.stride(), *rank_strides, transposed_b, *flags, chunk, early,
         block_m, block_n, block_k, config.group_m, config.subtile, stored, config.flatten),
    )  # fmt: skip
    of_b = (block_n, block_k) if transposed_b else (block_k, block_n)
    of_y = (block_m, block_n // (2 if config.subtile else 1)) if stored else None
    return _Settled(start, ((block_m, block_k), of_b, of_y))


def _settle_pointer(
    operands: tuple[Tensor, Tensor, Tensor], numbers: tuple[Any, ...], rank_strides: tuple[int, ...],
    transposed_b: bool, config: Config, flags: tuple[Any, ...], precision: str, chunk: int,
) -> _Settled:  # fmt: skip
    a, b, y = operands
    tiles = ceil_div(y.shape[0], config.block_m) * ceil_div(y.shape[1], config.block_n)
    start = Ready(
        gemm_epilogue_kernel, (tiles,), config.warps, config.stages,
        (*numbers, *a.stride(), *_strides(b, swapped=not transposed_b), *y.stride(), *rank_strides,
         *flags[:4], precision, flags[4], chunk, a.shape[1] % config.block_k == 0,
         config.block_m, config.block_n, config.block_k, config.group_m),
    )  # fmt: skip
    return _Settled(start, None)


def _settle(
    operands: tuple[Tensor, Tensor, Tensor], vectors: Vectors, h: Tensor | None, up: Tensor | None, scale: float,
    transposed_b: bool, config: Config | None,
) -> _Settled:  # fmt: skip
    """Configuration and every argument but the tensors."""
    a, b, y = operands
    (M, K), N = a.shape, y.shape[1]
    if b.shape != ((N, K) if transposed_b else (K, N)) or b.dtype != a.dtype:
        raise ValueError(f"a {tuple(a.shape)} of {a.dtype} and b {tuple(b.shape)} of {b.dtype} do not multiply")
    r = 0 if h is None else h.shape[1]
    capability, sms = device_facts(a.device)
    tma = _has_tma(capability) and _takes_tma(a) and _takes_tma(b)
    if config is None or (config.tma and not tma):
        crowded = h is not None and (h.dtype != a.dtype or r % 16 != 0)
        config = default_config(M, N, K, a.dtype, capability, tma, sms, crowded)
    base = "tf32" if a.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32 else "ieee"
    chunk, early = _rank_blocks(config, r, 0 if h is None else h.dtype.itemsize)
    bias, gain, up_gain = vectors
    flags = (bias is not None, gain is not None, h is not None, up_gain is not None, _rank_precision(a, h, base))
    numbers = (M, N, K, r, scale)
    rank_strides = (*_strides(h), *_strides(up, swapped=not transposed_b))
    if config.tma:
        return _settle_tma(operands, numbers, rank_strides, transposed_b, config, sms, flags, chunk, early)
    return _settle_pointer(operands, numbers, rank_strides, transposed_b, config, flags, base, chunk)


def _layout(t: Tensor | None) -> Any:
    return None if t is None else (t.dtype, t.shape, t.stride())


_settled = memo()


def gemm(
    a: Tensor,
    b: Tensor,
    *,
    transposed_b: bool,
    bias: Tensor | None = None,
    gain: Tensor | None = None,
    h: Tensor | None = None,
    up: Tensor | None = None,
    up_gain: Tensor | None = None,
    scale: float = 1.0,
    config: Config | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """gain (a b^T) + up_gain scale h up^T + bias where ``transposed_b``, else gain (a b) + up_gain scale h up + bias.

    A ``config`` of the TMA kernel gives way to a default of the pointer kernel where a's or b's strides rule TMA out.
    """
    y = a.new_empty((a.shape[0], b.shape[0 if transposed_b else 1])) if out is None else out
    if y.numel() == 0:
        return y
    if h is None or up is None or h.shape[1] == 0:
        h = up = up_gain = None
    aligned = (a.data_ptr() | b.data_ptr() | y.data_ptr()) & 15 == 0
    key = (
        a.device, _layout(a), _layout(b), transposed_b, None if out is None else out.stride(), _layout(h), _layout(up),
        _layout(bias), _layout(gain), _layout(up_gain), scale, config, aligned,
        a.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32,
    )  # fmt: skip
    found = _settled.get(key)
    if found is None:
        found = keep(
            _settled, key, _settle((a, b, y), (bias, gain, up_gain), h, up, float(scale), transposed_b, config)
        )
    vectors = tuple(
        item if item is None or item.is_contiguous() else item.contiguous() for item in (bias, gain, up_gain)
    )
    if found.blocks is None:
        found.start(a, b, y, *vectors, h, up)
    else:
        of_a, of_b, of_y = found.blocks
        found.start(Tile(a, of_a), Tile(b, of_b), y if of_y is None else Tile(y, of_y), *vectors, h, up)
    return y
