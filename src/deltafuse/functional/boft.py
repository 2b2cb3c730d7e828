"""BOFT: m butterfly stages of block rotations, W' = R_m ... R_1 W, then an optional rescale of the rows.

Shapes: blocks (m, num, b, b) with b even and num a power of two, rescale (out, 1...) or None. ``scale`` is the
strength: each stage is scale * R + (1 - scale) * I and the rescale 1 + scale * (v - 1), so scale 0 is the base exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.errors import ShapeError
from ..deltas import Butterfly
from ._rotate import blocks_and_rescale, need, rotated_output, rotated_weight
from .general import power2factorization


def weight_gen(
    org_weight: Tensor, max_block_size: int, boft_m: int = -1, rescale: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Zero blocks (m, num, b, b) for a weight (out, ...), and ones (out, 1...) or None.

    ``boft_m``: at most this many stages (-1: all). ShapeError where out has no legal block.
    """
    out, *rest = org_weight.shape
    block, count = power2factorization(out, max_block_size)
    if block is None:
        raise ShapeError(
            f"output dimension {out} has no even block of at most {max_block_size} with a power-of-two count. "
            f"Legal block sizes: {_legal_blocks(out)}."
        )
    stages = count.bit_length()
    if boft_m != -1:
        stages = min(boft_m, stages)
    blocks = torch.zeros(stages, count, block, block)
    return blocks, torch.ones(out, *[1] * len(rest)) if rescale else None


def _legal_blocks(out: int) -> str:
    sizes = [out // 2**power for power in range(out.bit_length()) if out % 2**power == 0]
    return ", ".join(str(size) for size in sizes if size % 2 == 0) or "none, the dimension is odd"


def diff_weight(
    org_weight: Tensor,
    *weights: Tensor | None,
    constraint: float | None = None,
    scale: float = 1,
    backend: str | None = None,
) -> Tensor:
    """W' - W for (blocks, rescale), shape of ``org_weight``, float32 or better."""
    delta = _delta(weights, constraint)
    return rotated_weight(delta, org_weight, ("butterfly",), scale, backend)


def bypass_forward_diff(
    org_out: Tensor,
    *weights: Tensor | None,
    constraint: float | None = None,
    need_transpose: bool = False,
    scale: float = 1,
    backend: str | None = None,
) -> Tensor:
    """(W' - W) x from ``org_out`` = W x before its bias; ``need_transpose``: the channels are axis 1, not the last."""
    delta = _delta(weights, constraint)
    return rotated_output(delta, org_out, need_transpose, ("butterfly",), scale, backend)


def _delta(weights: tuple[Tensor | None, ...], constraint: float | None) -> Butterfly:
    blocks, rescale = blocks_and_rescale(weights)
    need(blocks.dim() == 4, f"BOFT blocks have shape (m, num, b, b), got {tuple(blocks.shape)}")
    return Butterfly(blocks, float(constraint or 0), rescale)
