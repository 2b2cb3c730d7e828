"""What every launch needs: grid arithmetic, dtype rules of kernels, counters for split reductions."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

MAX_KERNEL_RANK = 256
"""Ranks above run as plain products: at that size they are products like any other."""
_SPLIT_ROWS = 512


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def pad_rank(rank: int) -> int:
    """The rank axis inside a kernel: a power of two that tensor cores take. Padding never leaves registers."""
    return max(16, 1 << (rank - 1).bit_length())


def rank_dtype(dtype: torch.dtype) -> torch.dtype:
    """dtype of rank-space tensors beside a layer that runs in ``dtype``."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


def dot_precision(dtype: torch.dtype) -> str:
    """How a product of float32 operands runs: three tf32 products keep float32's precision on tensor cores."""
    if dtype != torch.float32:
        return "tf32"
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "tf32x3"


@lru_cache(maxsize=16)
def processors(device: torch.device) -> int:
    """Multiprocessors of ``device``; a small number stands for the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def chunks_for(rows: int, tiles: int, block: int, device: torch.device) -> tuple[int, int]:
    """(rows a chunk, chunks): rows are split only while columns alone leave multiprocessors idle."""
    wanted = max(1, min(ceil_div(2 * processors(device), tiles), rows // _SPLIT_ROWS))
    per_chunk = ceil_div(ceil_div(max(1, rows), wanted), block) * block
    return per_chunk, max(1, ceil_div(rows, per_chunk))


_counters: dict[tuple[torch.device, int], Tensor] = {}


def counter(device: torch.device, count: int) -> Tensor:
    """``count`` zeros of int32 that every launch leaves at zero; one buffer per device and stream.

    Launches on one stream run one after the other, so they may share it.
    """
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    held = _counters.get((device, stream))
    if held is None or held.numel() < count:
        held = _counters[device, stream] = torch.zeros(max(4096, count), dtype=torch.int32, device=device)
    return held
