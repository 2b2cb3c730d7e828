"""Device facts: measured ceilings where a card was measured, safe guesses elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch


@dataclass(frozen=True)
class Ceilings:
    """flops and bytes per second that plain PyTorch reaches, and seconds a launch costs."""

    name: str
    flops16: float
    flops32: float
    bytes: float
    launch: float

    def flops(self, dtype: torch.dtype) -> float:
        """Matrix-product rate for ``dtype``."""
        return self.flops16 if dtype in (torch.float16, torch.bfloat16) else self.flops32


_H200 = Ceilings("NVIDIA H200", 750e12, 50e12, 4.3e12, 5e-6)
_UNKNOWN_CUDA = Ceilings("CUDA", 60e12, 15e12, 0.6e12, 6e-6)
_HOST = Ceilings("CPU", 0.1e12, 0.1e12, 20e9, 2e-6)


@lru_cache(maxsize=64)
def ceilings(device: torch.device) -> Ceilings:
    """Ceilings of ``device``; an unknown card gets ratios that hold on most."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        return _H200 if "H200" in name else _UNKNOWN_CUDA
    return _UNKNOWN_CUDA if device.type not in ("cpu", "meta") else _HOST
