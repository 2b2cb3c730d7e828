"""Wall time, host time, peak memory, launches and rates; device time is :mod:`deltafuse.core.timing`'s."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from ..core.device import ceilings
from ..core.timing import device_seconds, synchronize

Call = Callable[[], Any]
_COPY_BYTES = 512 << 20
_PRODUCT = 8192


def wall_and_host(call: Call, calls: int, device: torch.device) -> tuple[float, float]:
    """Seconds a call until its work is done, and until the host has enqueued it, over a loop of ``calls``."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    host = time.perf_counter()
    synchronize(device)
    return (time.perf_counter() - start) / calls, (host - start) / calls


def peak_bytes(call: Call, device: torch.device) -> int | None:
    """Peak memory of one call above what was allocated before it; None where the device does not count."""
    if device.type != "cuda":
        return None
    synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def launches(call: Call, device: torch.device) -> tuple[int | None, float | None]:
    """(kernels, copies and fills included, that one call runs; microseconds the profiler gives them together)."""
    if device.type != "cuda":
        return None, None
    from torch.profiler import ProfilerActivity, profile

    synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        call()
        synchronize(device)
    on_device = [event for event in seen.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    kernels = [event for event in on_device if not getattr(event, "is_user_annotation", False)]
    return len(kernels), float(sum(event.time_range.elapsed_us() for event in kernels))


@lru_cache(maxsize=32)
def copy_rate(device: torch.device) -> float:
    """Bytes a second, read and written, of a large copy."""
    if device.type != "cuda":
        return ceilings(device).bytes
    source = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    target.copy_(source)
    (samples,) = device_seconds([lambda: target.copy_(source)], 9, device)
    return 2 * _COPY_BYTES / min(samples)


@lru_cache(maxsize=32)
def product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Flops a second of a large matrix product."""
    if device.type != "cuda":
        return ceilings(device).flops(dtype)
    left, right = (torch.randn(_PRODUCT, _PRODUCT, device=device).to(dtype) for _ in range(2))
    left @ right
    (samples,) = device_seconds([lambda: left @ right], 9, device)
    return 2 * _PRODUCT**3 / min(samples)
