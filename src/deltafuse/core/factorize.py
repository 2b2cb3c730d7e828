"""How a dimension is split: Kronecker factors, rotation blocks, butterfly blocks."""

from __future__ import annotations

import math

from .errors import ShapeError


def factorization(dimension: int, factor: int = -1) -> tuple[int, int]:
    """(m, n) with m n = dimension and m <= n.

    A positive ``factor`` that divides the dimension is one of the two. Otherwise m is the divisor up to ``factor``
    (any, where it is negative) whose split has the smallest sum, walking up while the sum keeps falling.
    """
    if factor > 0 and dimension % factor == 0:
        other = dimension // factor
        return min(factor, other), max(factor, other)
    limit = dimension if factor < 0 else factor
    best = (1, dimension)
    for m in range(2, math.isqrt(dimension) + 1):
        if m > limit:
            break
        if dimension % m == 0:
            best = (m, dimension // m)
    return best


def power2factorization(dimension: int, factor: int = -1) -> tuple[int | None, int]:
    """(block, num) with block even and at most ``factor``, num a power of two, block num = dimension.

    The largest such block is taken; (None, 0) where there is none.
    """
    limit = dimension if factor == -1 else min(factor, dimension)
    found: tuple[int | None, int] = (None, 0)
    for block in range(2, limit + 1, 2):
        if dimension % block == 0 and _is_power_of_two(dimension // block):
            found = (block, dimension // block)
    return found


def butterfly_blocks(dimension: int, factor: int, layer: str) -> tuple[int, int]:
    """As :func:`power2factorization`, or a ShapeError that names the layer, the dimension and the legal sizes."""
    block, num = power2factorization(dimension, factor)
    if block is None:
        legal = [size for size in range(2, dimension + 1, 2) if dimension % size == 0]
        legal = [size for size in legal if _is_power_of_two(dimension // size)]
        raise ShapeError(
            f"layer '{layer}': its output dimension {dimension} has no butterfly split with blocks up to {factor}. "
            f"Legal block sizes (lora_dim) for this dimension: {_listed(legal)}."
        )
    return block, num


def rotation_block(dimension: int, wanted: int, layer: str, side: str) -> int:
    """``wanted`` where it divides the dimension, or a ShapeError that names the legal sizes."""
    if wanted > 0 and dimension % wanted == 0:
        return wanted
    legal = [size for size in range(2, dimension + 1) if dimension % size == 0]
    raise ShapeError(
        f"layer '{layer}': its {side} dimension {dimension} has no rotation blocks of size {wanted}. "
        f"Legal block sizes (lora_dim) for this dimension: {_listed(legal)}."
    )


def _is_power_of_two(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0


def _listed(values: list[int], most: int = 16) -> str:
    if not values:
        return "none"
    shown = ", ".join(str(value) for value in values[:most])
    return f"{shown}, ..., {values[-1]}" if len(values) > most else shown
