"""Device time of calls: interleaved, shuffled, cold in L2, behind a backlog so that the host's pace does not show."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

FLUSH_BYTES = 256 << 20
"""More than twice the L2 of any card so far: what a call reads has left the cache."""
_CYCLES_PER_SECOND = 2e9
_LONGEST_BACKLOG = 20e-3
Call = Callable[[], Any]


def synchronize(device: torch.device) -> None:
    """Wait for ``device``; a CPU is never behind."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@lru_cache(maxsize=8)
def _buffer(device: torch.device) -> Tensor:
    return torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)


def release_buffers() -> None:
    """Give the flush buffers back to the allocator."""
    _buffer.cache_clear()


def host_seconds(call: Call, device: torch.device, repeats: int = 3) -> float:
    """Seconds until ``call`` returns on an idle device: the least of ``repeats``."""
    best = float("inf")
    for _ in range(repeats):
        synchronize(device)
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    synchronize(device)
    return best


def device_seconds(calls: Sequence[Call], rounds: int, device: torch.device, seed: int = 0) -> list[list[float]]:
    """``rounds`` samples of every call, warmed up by the caller. Every round runs all calls once, in a new order."""
    shuffler = random.Random(seed)
    samples: list[list[float]] = [[] for _ in calls]
    if device.type != "cuda":
        for _ in range(rounds):
            for index in shuffler.sample(range(len(calls)), len(calls)):
                start = time.perf_counter()
                calls[index]()
                samples[index].append(time.perf_counter() - start)
        return samples
    with torch.cuda.device(device):
        waits = [min(_LONGEST_BACKLOG, 2 * host_seconds(call, device) + 20e-6) for call in calls]
        for _ in range(rounds):
            order = shuffler.sample(range(len(calls)), len(calls))
            pairs = [(index, *_timed(calls[index], waits[index], device)) for index in order]
            torch.cuda.synchronize(device)
            for index, start, stop in pairs:
                samples[index].append(start.elapsed_time(stop) * 1e-3)
    return samples


def _timed(call: Call, wait: float, device: torch.device) -> tuple[Any, Any]:
    """Events around ``call``, enqueued while the device is still busy flushing and waiting."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    _buffer(device).zero_()
    torch.cuda._sleep(int(wait * _CYCLES_PER_SECOND))
    start.record()
    call()
    stop.record()
    return start, stop
