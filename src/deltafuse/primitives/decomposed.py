"""A linear layer with a low-rank path under a gain per output row, norm included (DoRA), as one primitive.

decomposed_linear: g = magnitude / |W + alpha B A| per row, m the strength:
y = (1 + m (g - 1)) (W x) + m g alpha (mask (x A^T)) B^T + bias.
x (..., K), W (N, K), bias (N,), A (r, K), B (N, r), magnitude of N elements, mask (batch, r) for x of (batch, ..., K).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .examples import Draw, Sizes, example
from .linear import lowrank_linear
from .norms import decomposition_gain
from .registry import primitive


@primitive("y = (1 + m (g - 1)) W x + m g alpha B A x + bias with g = magnitude / |W + alpha B A|")
def decomposed_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    down: Tensor,
    up: Tensor,
    alpha: float,
    magnitude: Tensor,
    strength: float | Tensor = 1.0,
    detach: bool = False,
    mask: Tensor | None = None,
) -> Tensor:
    """See the module's formula. detach: no gradient through the norm."""
    inner = (up.detach(), down.detach()) if detach else (up, down)
    gain = decomposition_gain(weight, *inner, alpha, magnitude, 0)
    whole = isinstance(strength, (int, float)) and strength == 1
    kept, branch = (gain, gain) if whole else (1 + (gain - 1) * strength, gain * strength)
    return lowrank_linear(x, weight, bias, down, up, alpha, kept, branch, mask)


def _call(sizes: Sizes, draw: Draw, bias: bool) -> tuple[Any, ...]:
    x, weight = draw.data(*sizes.lead, sizes.inner), draw.weight(sizes.out, sizes.inner)
    shift = draw.data(sizes.out, scale=0.3, grad=False) if bias else None
    down = draw.factor(sizes.rank, sizes.inner, scale=sizes.inner**-0.5)
    return x, weight, shift, down, draw.factor(sizes.out, sizes.rank), 0.7, draw.positive(sizes.out, 1)


@example("decomposed_linear", "plain")
def _plain(sizes: Sizes, draw: Draw) -> tuple[Any, ...]:
    return *_call(sizes, draw, False), 1.0, False, None


@example("decomposed_linear", "bias, strength, rank mask per sample")
def _strength(sizes: Sizes, draw: Draw) -> tuple[Any, ...]:
    return *_call(sizes, draw, True), 0.6, False, draw.mask(sizes.lead[0], sizes.rank)


@example("decomposed_linear", "bias, norm detached")
def _detached(sizes: Sizes, draw: Draw) -> tuple[Any, ...]:
    return *_call(sizes, draw, True), 1.0, True, None


@example("decomposed_linear", "bias, strength as a tensor")
def _tensor(sizes: Sizes, draw: Draw) -> tuple[Any, ...]:
    return *_call(sizes, draw, True), draw.positive(1, grad=False).view(()), False, None
