"""OFT on the output side: per block Q = B - B^T, R = (I + Q)(I - Q)^-1, W' = R^T W, for free blocks B (num, s, s).

A rescale vector (out, 1...) multiplies the rotated rows. ``constraint`` bounds the Frobenius norm of all Q together.
Rotations are solved and applied in float32 or better, and results are in that dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..deltas import Rotation
from ..primitives.rotation import cayley_delta
from ._rotate import blocks_and_rescale, need, rotated_output, rotated_weight
from .general import factorization


def get_r(oft_blocks: Tensor, I: Tensor | None = None, constraint: float | None = 0) -> Tensor:
    """The rotations R (..., s, s) of blocks (..., s, s), float32 or better. ``I`` may hold a ready identity."""
    delta = cayley_delta(oft_blocks, float(constraint or 0))
    eye = torch.eye(delta.shape[-1], device=delta.device) if I is None else I
    return delta + eye.to(delta.dtype)


def weight_gen(org_weight: Tensor, max_block_size: int = -1, rescale: bool = False) -> tuple[Tensor, Tensor | None]:
    """Zero blocks (num, s, s) for a weight (out, ...) with s <= num, and ones (out, 1...) or None."""
    out, *rest = org_weight.shape
    size, count = factorization(out, max_block_size)
    return torch.zeros(count, size, size), torch.ones(out, *[1] * len(rest)) if rescale else None


def diff_weight(
    org_weight: Tensor, *weights: Tensor | None, constraint: float | None = None, backend: str | None = None
) -> Tensor:
    """W' - W for (blocks, rescale), shape of ``org_weight``."""
    delta = _delta(weights, constraint)
    return rotated_weight(delta, org_weight, ("block_rotate",), 1.0, backend)


def bypass_forward_diff(
    x: Tensor | None,
    org_out: Tensor,
    *weights: Tensor | None,
    constraint: float | None = None,
    need_transpose: bool = False,
    backend: str | None = None,
) -> Tensor:
    """(W' - W) x from ``org_out`` = W x before its bias; ``x`` is not used.

    ``need_transpose``: the channels are axis 1, as in convolution layers, instead of the last.
    """
    delta = _delta(weights, constraint)
    return rotated_output(delta, org_out, need_transpose, ("block_rotate",), 1.0, backend)


def _delta(weights: tuple[Tensor | None, ...], constraint: float | None) -> Rotation:
    blocks, rescale = blocks_and_rescale(weights)
    need(blocks.dim() == 3, f"OFT blocks have shape (num, s, s), got {tuple(blocks.shape)}")
    return Rotation(blocks, float(constraint or 0), rescale)
