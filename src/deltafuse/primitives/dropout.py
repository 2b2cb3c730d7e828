"""Dropout whose mask is a function of a seed: the same bits in PyTorch and in every kernel, in forward and backward.

Element (m, n) of a matrix is kept where hash(seed, m, n) >= p 2^32, a comparison of integers. The hash is a finalizer
of 32-bit words (shifts and two products) over a key of the column plus a key of the row; a second key of the row enters
between the products. Keys are finalized words of the index and the seed's halves, made once per row and per column, so
a kernel pays nine integer operations an element.

keep_mask: seed (1,) of int64 -> (rows, cols) of bool. Nothing is drawn here and nothing waits for a device: who calls
draws the seed, from PyTorch's generator of that device, so checkpoints and graph replays see the states they restore.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.errors import OptionError

FIRST, SECOND, GOLDEN = 0x21F0AAAD, 0xD35A2D97, 0x9E3779B9
"""The finalizer's factors, and what sets keys apart."""
_WORD = 0xFFFFFFFF


def draw_seed(device: torch.device) -> Tensor:
    """A seed (1,) from the device's own generator."""
    return torch.randint(0, (1 << 63) - 1, (1,), dtype=torch.int64, device=device)


def checked(p: float, seed: Tensor | None) -> tuple[float, Tensor | None]:
    """Both as they are where something is dropped, else neither."""
    if p == 0:
        return 0.0, None
    if seed is None:
        raise OptionError(f"dropout {p} needs a seed: draw_seed(x.device) makes one")
    return float(p), seed


def threshold(p: float) -> int:
    """What a hash, read as a signed word plus 2^31, must reach to be kept; certain dropout is :func:`keep_scale`'s."""
    return min(int(p * (1 << 32)), _WORD) - (1 << 31)


def keep_scale(p: float) -> float:
    """What kept values are multiplied by; zero where nothing is kept."""
    return 1.0 / (1.0 - p) if p < 1 else 0.0


def keep_mask(seed: Tensor, rows: int, cols: int, p: float) -> Tensor:
    """(rows, cols), True where an element stays."""
    low, high = seed & _WORD, (seed >> 32) & _WORD
    first = _mixed((low + GOLDEN) & _WORD)
    second = _mixed(high ^ first)
    m, n = (torch.arange(count, dtype=torch.int64, device=seed.device) for count in (rows, cols))
    row = _mixed(_mixed((m + first) & _WORD) ^ second)[:, None]
    col = _mixed((_mixed(n ^ second) + first) & _WORD)[None, :]
    return _hashed((row + col) & _WORD, _mixed((row + GOLDEN) & _WORD)) >= threshold(p) + (1 << 31)


def _mixed(x: Tensor) -> Tensor:
    """A word of 32 bits, finalized."""
    x = _hashed(x, None)
    return x ^ (x >> 15)


def _hashed(x: Tensor, key: Tensor | None) -> Tensor:
    """The finalizer without its last shift, which leaves the bits alone that a probability looks at."""
    x = _times(x ^ (x >> 16), FIRST)
    x = x ^ (x >> 15)
    return _times(x if key is None else x ^ key, SECOND)


def _times(x: Tensor, factor: int) -> Tensor:
    """The low word of a product; the factor's sign keeps it inside 64 bits."""
    return (x * (factor if factor < 1 << 31 else factor - (1 << 32))) & _WORD
