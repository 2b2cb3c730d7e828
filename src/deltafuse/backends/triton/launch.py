"""What every launch needs: bound launchers, grid arithmetic, dtype rules of kernels, counters for split reductions."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

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
# Triton's own launch binds a signature, specializes every argument and hashes the result: some 40 us of host time for a
# kernel of thirty arguments on a slow host. Here one tuple finds the compiled kernel, and its C launcher is called with
# plain addresses. Where this Triton's launcher looks different, launches go Triton's way.

_MAX_BOUND = 4096
_bound: dict[Any, Any] = {}
_tensors: dict[int, int] = {}
_maps: dict[Any, list[Any]] = {}


class Tile(NamedTuple):
    """A matrix that a kernel reads or writes through a tensor descriptor, in blocks of this shape."""

    tensor: Tensor
    block: tuple[int, int]

    def descriptor(self) -> Any:
        from triton.tools.tensor_descriptor import TensorDescriptor

        return TensorDescriptor(self.tensor, list(self.tensor.shape), list(self.tensor.stride()), list(self.block))


def _count_tensors(kernel: Any) -> int:
    """A kernel's arguments begin with its tensors: names in ``_ptr``, or ``_tiles`` for descriptors."""
    count = 0
    for name in kernel.arg_names:
        if not name.endswith(("_ptr", "_tiles")):
            break
        count += 1
    _tensors[id(kernel)] = count
    return count


def launch(kernel: Any, grid: tuple[int, ...], warps: int, stages: int, *args: Any) -> None:
    """``kernel[grid](*args, num_warps=warps, num_stages=stages)`` on the first tensor's device.

    Tensors come first in every kernel's signature; a :class:`Tile` stands for a descriptor.
    """
    count = _tensors.get(id(kernel)) or _count_tensors(kernel)
    tensors, values = args[:count], args[count:]
    first = tensors[0]
    where = first.tensor if isinstance(first, Tile) else first
    assert where is not None
    if not where.is_cuda:
        _plainly(kernel, grid, warps, stages, tensors, values)
        return
    device = where.get_device()
    if device != torch.cuda.current_device():
        with torch.cuda.device(device):
            _launch(kernel, grid, warps, stages, tensors, values, device)
    else:
        _launch(kernel, grid, warps, stages, tensors, values, device)


def _launch(
    kernel: Any, grid: tuple[int, ...], warps: int, stages: int, tensors: tuple[Any, ...], values: Any, device: int
) -> None:
    pointers: list[Any] = []
    kinds: list[Any] = []
    bits = 0
    for item in tensors:
        if item is None:
            pointers.append(None)
            kinds.append(None)
        elif type(item) is Tile:
            pointers.append(item)
            kinds.append(item.tensor.dtype)
            kinds.append(item.block)
        else:
            pointer = item.data_ptr()
            bits |= pointer
            pointers.append(pointer)
            kinds.append(item.dtype)
    aligned: Any = True
    if bits & 15:
        aligned = tuple(isinstance(item, int) and item & 15 == 0 for item in pointers)
    key = (id(kernel), grid, warps, stages, device, tuple(kinds), aligned, values)
    bound = _bound.get(key)
    if bound is None:
        if len(_bound) >= _MAX_BOUND:
            _bound.clear()
        _bound[key] = _bind(_plainly(kernel, grid, warps, stages, tensors, values), grid)
    elif bound is _UNBOUND:
        _plainly(kernel, grid, warps, stages, tensors, values)
    else:
        bound(torch._C._cuda_getCurrentRawStream(device), pointers, values)


def _plainly(kernel: Any, grid: Any, warps: int, stages: int, tensors: tuple[Any, ...], values: Any) -> Any:
    args = [item.descriptor() if isinstance(item, Tile) else item for item in tensors]
    return kernel[grid](*args, *values, num_warps=warps, num_stages=stages)


_UNBOUND = object()


def _bind(compiled: Any, grid: tuple[int, ...]) -> Any:
    """A callable (stream, pointers, values) over the C launcher of ``compiled``, or _UNBOUND."""
    try:
        launcher = compiled.run
        if launcher.global_scratch_size or launcher.profile_scratch_size:
            return _UNBOUND
        start, metas = launcher.launch, []
        if getattr(start, "__closure__", None):
            cells = dict(
                zip(start.__code__.co_freevars, (cell.cell_contents for cell in start.__closure__), strict=True)
            )
            start, metas = cells["launcher"], cells["tensordesc_meta"]
        x, y, z = (*grid, 1, 1)[:3]
        head = (compiled.function, launcher.launch_cooperative_grid, launcher.launch_pdl, None, None)
        tail = (compiled.packed_metadata, None, None, None)
    except (AttributeError, KeyError, TypeError):
        return _UNBOUND

    if not metas:

        def run(stream: int, pointers: list[Any], values: Any) -> None:
            start(x, y, z, stream, *head, *tail, *pointers, *values)

        return run

    def run_described(stream: int, pointers: list[Any], values: Any) -> None:
        args: list[Any] = []
        described = 0
        for item in pointers:
            if type(item) is Tile:
                args += _expanded(item, metas[described])
                described += 1
            else:
                args.append(item)
        start(x, y, z, stream, *head, *tail, *args, *values)

    return run_described


def _expanded(tile: Tile, meta: Any) -> list[Any]:
    """A descriptor as the C launcher takes it. It holds an address, not the tensor, so keeping it keeps no memory."""
    tensor = tile.tensor
    key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tile.block, tensor.dtype)
    found = _maps.get(key)
    if found is None:
        from triton.backends.nvidia.driver import make_tensordesc_arg

        if len(_maps) >= _MAX_BOUND:
            _maps.clear()
        found = _maps[key] = make_tensordesc_arg(tile.descriptor(), meta)
    return found
