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


def split_axis(length: int, block: int, tiles: int, device: torch.device, split: int = 0) -> tuple[int, int]:
    """(length a program, programs): an axis is shared out, over ``split`` programs or, with 0, over as many as give the
    multiprocessors that ``tiles`` alone leave idle work."""
    wanted = max(1, min(split or ceil_div(2 * processors(device), tiles), length // (2 * block)))
    share = ceil_div(ceil_div(length, wanted), block) * block
    return share, max(1, ceil_div(length, share))


def chunks_for(rows: int, tiles: int, block: int, device: torch.device) -> tuple[int, int]:
    """(rows a chunk, chunks): rows are split only while columns alone leave multiprocessors idle."""
    wanted = max(1, min(ceil_div(2 * processors(device), tiles), rows // _SPLIT_ROWS))
    per_chunk = ceil_div(ceil_div(max(1, rows), wanted), block) * block
    return per_chunk, max(1, ceil_div(rows, per_chunk))


_counters: dict[tuple[int, int], Tensor] = {}


def counter(device: torch.device, count: int) -> Tensor:
    """``count`` zeros of int32 that every launch leaves at zero; one buffer per device and stream.

    Launches on one stream run one after the other, so they may share it. A captured graph gets its own, zeroed at each
    replay: it may run on any stream later.
    """
    if device.type != "cuda":
        index, stream = -1, 0
    elif torch.cuda.is_current_stream_capturing():
        return torch.zeros(count, dtype=torch.int32, device=device)
    else:
        index = torch.cuda.current_device() if device.index is None else device.index
        stream = torch._C._cuda_getCurrentRawStream(index)
    held = _counters.get((index, stream))
    if held is None or held.numel() < count:
        held = _counters[index, stream] = torch.zeros(max(4096, count), dtype=torch.int32, device=device)
    return held


_scratch: dict[tuple[int, int], Tensor] = {}
_MAX_SCRATCH = 16 << 20


def scratch(device: torch.device, count: int) -> Tensor:
    """At least ``count`` float32 that live for one launch: one buffer per device and stream, as :func:`counter`."""
    if device.type != "cuda" or count > _MAX_SCRATCH or torch.cuda.is_current_stream_capturing():
        return torch.empty(count, dtype=torch.float32, device=device)
    index = torch.cuda.current_device() if device.index is None else device.index
    stream = torch._C._cuda_getCurrentRawStream(index)
    held = _scratch.get((index, stream))
    if held is None or held.numel() < count:
        held = _scratch[index, stream] = torch.empty(max(1 << 20, count), dtype=torch.float32, device=device)
    return held


# -- bound launchers --------------------------------------------------------------------------------------------------
# Triton's own launch binds a signature, specializes every argument and hashes the result: some 40 us of host time for a
# kernel of thirty arguments on a slow host. Here one tuple finds the compiled kernel, and its C launcher is called with
# plain addresses. Where this Triton's launcher looks different, launches go Triton's way.

_MAX_BOUND = 4096
_current_device: Any = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
"""The current device without the checks of the public function."""
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

    Tensors come first in every kernel's signature.
    """
    count = _tensors.get(id(kernel)) or _count_tensors(kernel)
    tensors, values = args[:count], args[count:]
    kinds = tuple([None if item is None else item.dtype for item in tensors])
    key = (id(kernel), grid, warps, stages, values, kinds)
    ready = _launches.get(key)
    if ready is None:
        ready = keep(_launches, key, Ready(kernel, grid, warps, stages, values))
    ready(*tensors)


class Ready:
    """A launch whose every argument but the tensors is settled. Whoever keeps one answers for the tensors' dtypes: they
    must stay what they were at its first call."""

    __slots__ = ("grid", "kernel", "stages", "start", "values", "warps")

    def __init__(self, kernel: Any, grid: tuple[int, ...], warps: int, stages: int, values: tuple[Any, ...]) -> None:
        self.kernel, self.grid, self.warps, self.stages, self.values = kernel, grid, warps, stages, values
        self.start: Any = None

    def __call__(self, *tensors: Any) -> None:
        first = tensors[0]
        if first is None:
            first = next(item for item in tensors if item is not None)
        where = first.tensor if type(first) is Tile else first
        if not where.is_cuda:
            _plainly(self, tensors)
            return
        device = where.get_device()
        if device != _current_device():
            with torch.cuda.device(device):
                self._launch(tensors, device)
        else:
            self._launch(tensors, device)

    def _launch(self, tensors: tuple[Any, ...], device: int) -> None:
        pointers: list[Any] = []
        bits = 0
        for item in tensors:
            if item is None or type(item) is Tile:
                pointers.append(item)
            else:
                pointer = item.data_ptr()
                bits |= pointer
                pointers.append(pointer)
        start = self.start
        if start is None or bits & 15:
            start = self._find(tensors, pointers, device)
            if start is None:
                return
            if not bits & 15:
                self.start = start
        start(self.grid, torch._C._cuda_getCurrentRawStream(device), pointers, self.values)

    def _find(self, tensors: tuple[Any, ...], pointers: list[Any], device: int) -> Any:
        """What starts the compiled kernel; None where Triton has just started it itself."""
        kinds = tuple(_kind(item, pointer) for item, pointer in zip(tensors, pointers, strict=True))
        key = (id(self.kernel), self.warps, self.stages, device, kinds, _specialized(self.kernel, self.values))
        bound = _bound.get(key)
        if bound is None:
            if len(_bound) >= _MAX_BOUND:
                _bound.clear()
            _bound[key] = _bind(_plainly(self, tensors))
            return None
        if bound is _UNBOUND:
            _plainly(self, tensors)
            return None
        return bound


def _kind(item: Any, pointer: Any) -> Any:
    if item is None:
        return None
    if type(item) is Tile:
        return item.tensor.dtype, item.block
    return item.dtype, pointer & 15 == 0


def _specialized(kernel: Any, values: tuple[Any, ...]) -> tuple[Any, ...]:
    """What of the other arguments decides the compiled code: constants by value, integers by 1, a multiple of 16 and
    their width."""
    found: list[Any] = []
    for param, value in zip(kernel.params[-len(values) :], values, strict=True):
        if param.is_constexpr or value is None or isinstance(value, (bool, str)):
            found.append(value)
        elif isinstance(value, int):
            wide = not -(1 << 31) <= value < 1 << 31
            found.append(wide if param.do_not_specialize else (wide, value == 1, value % 16 == 0))
        else:
            found.append(type(value))
    return tuple(found)


def _plainly(ready: Ready, tensors: tuple[Any, ...]) -> Any:
    """Triton's own launch."""
    args = [item.descriptor() if type(item) is Tile else item for item in tensors]
    return ready.kernel[ready.grid](*args, *ready.values, num_warps=ready.warps, num_stages=ready.stages)


_UNBOUND = object()


def _bind(compiled: Any) -> Any:
    """A callable (grid, stream, pointers, values) over the C launcher of ``compiled``, or _UNBOUND."""
    try:
        launcher = compiled.run
        if launcher.global_scratch_size or launcher.profile_scratch_size:
            return _UNBOUND
        start, metas = launcher.launch, []
        if getattr(start, "__closure__", None):
            held = (cell.cell_contents for cell in start.__closure__)
            cells = dict(zip(start.__code__.co_freevars, held, strict=True))
            start, metas = cells["launcher"], cells["tensordesc_meta"]
        head = (compiled.function, launcher.launch_cooperative_grid, launcher.launch_pdl, None, None)
        tail = (compiled.packed_metadata, None, None, None)
    except (AttributeError, KeyError, TypeError):
        return _UNBOUND

    def run(grid: tuple[int, ...], stream: int, pointers: list[Any], values: Any) -> None:
        x, y, z = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
        start(x, y, z, stream, *head, *tail, *pointers, *values)

    def run_described(grid: tuple[int, ...], stream: int, pointers: list[Any], values: Any) -> None:
        args: list[Any] = []
        described = 0
        for item in pointers:
            if type(item) is Tile:
                args += _expanded(item, metas[described])
                described += 1
            else:
                args.append(item)
        run(grid, stream, args, values)

    return run_described if metas else run


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


# -- settled launches, kept per shape ---------------------------------------------------------------------------------

_memos: list[dict[Any, Any]] = []


def memo() -> dict[Any, Any]:
    """A dictionary for launches settled once per key; all are emptied by :func:`forget`."""
    made: dict[Any, Any] = {}
    _memos.append(made)
    return made


def keep(made: dict[Any, Any], key: Any, value: Any) -> Any:
    """Put ``value`` under ``key``, emptying a memo that row counts without end have filled."""
    if len(made) >= _MAX_BOUND:
        made.clear()
    made[key] = value
    return value


def forget() -> None:
    """Settle every launch anew: configurations have changed."""
    for made in _memos:
        made.clear()


_launches = memo()
