"""What every launch needs: bound launchers, grid arithmetic, dtype rules of kernels, counters for split reductions."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

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


# -- bound launchers --------------------------------------------------------------------------------------------------
# Triton's own launch binds a signature, specializes every argument and hashes the result, some 40 us of host time for a
# kernel of thirty arguments. Here one tuple finds the compiled kernel, and its launcher is called directly.

_bound: dict[Any, Any] = {}
_free: dict[Any, frozenset[int]] = {}
_BIG = 1 << 31


def _free_arguments(kernel: Any) -> frozenset[int]:
    """Positions whose value never changes the code: what the kernel asks not to specialize."""
    found = _free.get(kernel)
    if found is None:
        found = _free[kernel] = frozenset(param.num for param in kernel.params if param.do_not_specialize)
    return found


def _key(kernel: Any, device: int, warps: int, stages: int, args: tuple[Any, ...]) -> tuple[Any, ...]:
    free = _free_arguments(kernel)
    parts: list[Any] = [kernel, device, warps, stages]
    for index, arg in enumerate(args):
        if isinstance(arg, Tensor):
            parts.append(arg.dtype)
            parts.append(arg.data_ptr() & 15 == 0)
        elif type(arg) is float:
            parts.append(float)
        elif index in free and type(arg) is int and arg < _BIG:
            parts.append(int)
        elif hasattr(arg, "block_shape"):  # a tensor descriptor
            parts.append(arg.base.dtype)
            parts.append(tuple(arg.block_shape))
        else:
            parts.append(arg)
    return tuple(parts)


def launch(kernel: Any, grid: tuple[int, ...], warps: int, stages: int, *args: Any) -> None:
    """``kernel[grid](*args, num_warps=warps, num_stages=stages)`` on the device of the first argument."""
    first = getattr(args[0], "base", args[0])
    if not first.is_cuda:
        kernel[grid](*args, num_warps=warps, num_stages=stages)
        return
    device = first.get_device()
    key = _key(kernel, device, warps, stages, args)
    compiled = _bound.get(key)
    if device != torch.cuda.current_device():
        with torch.cuda.device(device):
            _start(kernel, key, compiled, device, grid, warps, stages, args)
    else:
        _start(kernel, key, compiled, device, grid, warps, stages, args)


def _start(
    kernel: Any, key: Any, compiled: Any, device: int, grid: tuple[int, ...], warps: int, stages: int, args: Any
) -> None:
    if compiled is None:
        _bound[key] = kernel[grid](*args, num_warps=warps, num_stages=stages)
        return
    stream = torch._C._cuda_getCurrentRawStream(device)
    y = grid[1] if len(grid) > 1 else 1
    z = grid[2] if len(grid) > 2 else 1
    compiled.run(grid[0], y, z, stream, compiled.function, compiled.packed_metadata, None, None, None, *args)
