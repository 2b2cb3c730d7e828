"""Sizes worth checking and measuring: small and odd ones for tests, layers of real models for cards."""

from __future__ import annotations

import re
from dataclasses import replace

from ..core.errors import OptionError
from .examples import Sizes

WEIGHTS = (
    (640, 640), (1280, 1280), (1280, 5120), (2048, 2048), (3072, 3072),
    (3072, 12288), (12288, 3072), (4096, 4096), (11008, 4096), (21504, 3072),
)  # fmt: skip
"""(N, K) of layers in diffusion models and LLMs."""
ROWS = (77, 1024, 4096, 16384, 65536)
RANKS = (4, 16, 64, 128)
FACTORS = (-1, 4, 8, 16)
TINY = (Sizes(lead=(2, 17), inner=48, out=64, rank=5),)
"""One small call with dimensions that kernels specialize as they do real ones."""
SMALL = (
    Sizes(),
    Sizes(lead=(1, 1), inner=33, out=16, rank=1, factor=-1),
    Sizes(lead=(3, 2, 11), inner=130, out=67, rank=18, factor=2),
)
"""Odd dimensions and tails, fast on a CPU."""
_PATTERN = re.compile(r"^(\d+)x(\d+)x(\d+)(?:r(\d+))?(?:f(-?\d+))?$")


def layer(rows: int, out: int, inner: int, rank: int = 16, factor: int = 8) -> Sizes:
    """A linear layer of N = out and K = inner called with M = rows."""
    return Sizes(lead=(1, rows), inner=inner, out=out, rank=rank, factor=factor)


def sweep() -> list[Sizes]:
    """Every weight, then every row count, rank and factor at one weight: the list behind a full check."""
    base = layer(4096, 3072, 3072)
    found = [layer(4096, out, inner) for out, inner in WEIGHTS]
    found += [layer(rows, 3072, 3072) for rows in ROWS]
    found += [replace(base, rank=rank) for rank in RANKS] + [replace(base, factor=factor) for factor in FACTORS]
    return list(dict.fromkeys(found))


def common() -> list[Sizes]:
    """The list for timing: what most layers of today's models look like."""
    weights = ((1280, 1280), (3072, 3072), (3072, 12288), (12288, 3072), (4096, 4096))
    found = [layer(4096, out, inner) for out, inner in weights]
    return [*found, layer(1024, 3072, 3072), layer(16384, 3072, 3072), layer(4096, 3072, 3072, rank=64)]


def to_tune() -> list[Sizes]:
    """Every weight at the row counts of training, and once more at rank 64."""
    found = [layer(rows, *weight) for weight in WEIGHTS for rows in (1024, 4096, 16384)]
    return found + [layer(4096, *weight, rank=64) for weight in WEIGHTS]


def parse(text: str) -> Sizes:
    """``MxNxK``, ``MxNxKrR`` or ``MxNxKrRfF``: 4096x3072x12288r16f8 is 4096 rows of a layer 12288 -> 3072."""
    match = _PATTERN.match(text.strip().lower())
    if match is None or 0 in (int(side) for side in match.groups()[:4] if side is not None):
        raise OptionError(
            f"shape '{text}' is not rows x out x in with an optional rank and factor, as 4096x3072x3072r16"
        )
    rows, out, inner, rank, factor = match.groups()
    return layer(int(rows), int(out), int(inner), int(rank or 16), int(factor or 8))


def name(sizes: Sizes) -> str:
    """``sizes`` as :func:`parse` reads it."""
    return f"{sizes.rows}x{sizes.out}x{sizes.inner}r{sizes.rank}f{sizes.factor}"
