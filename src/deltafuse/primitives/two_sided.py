"""A linear layer with a low-rank path before it and one beside it: y = W (x + alpha A1 A2 x) + alpha B1 B2 x + bias.

x (..., K), W (N, K), bias (N,), A1 (K, r1), A2 (r1, K), B1 (N, r2), B2 (r2, K).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .examples import Draw, Sizes, example
from .gemm import add_product, gemm_epilogue
from .lowrank import lowrank_down
from .registry import primitive


@primitive("y = W (x + alpha A1 A2 x) + alpha B1 B2 x + bias")
def glora_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    a_up: Tensor,
    a_down: Tensor,
    b_up: Tensor,
    b_down: Tensor,
    alpha: float = 1.0,
) -> Tensor:
    """See the module's formula."""
    shifted = add_product(x, lowrank_down(x, a_down), a_up, alpha)
    return gemm_epilogue(shifted, weight, bias, lowrank_down(x, b_down), b_up, alpha)


def _call(sizes: Sizes, draw: Draw, bias: bool, second: int) -> tuple[Any, ...]:
    x, weight = draw.data(*sizes.lead, sizes.inner), draw.weight(sizes.out, sizes.inner)
    shift = draw.data(sizes.out, grad=False) if bias else None
    first = draw.factor(sizes.inner, sizes.rank), draw.factor(sizes.rank, sizes.inner, scale=sizes.inner**-0.5)
    return x, weight, shift, *first, draw.factor(sizes.out, second), draw.factor(second, sizes.inner)


@example("glora_linear", "plain")
def _plain(sizes: Sizes, draw: Draw) -> tuple[Any, ...]:
    return *_call(sizes, draw, False, sizes.rank), 0.7


@example("glora_linear", "bias, ranks differ")
def _bias(sizes: Sizes, draw: Draw) -> tuple[Any, ...]:
    return *_call(sizes, draw, True, sizes.rank + 3), -0.3


@example("glora_linear", "factors of two dtypes")
def _mixed(sizes: Sizes, draw: Draw) -> tuple[Any, ...]:
    x, weight, bias, a_up, a_down, b_up, b_down, alpha = _plain(sizes, draw)
    narrow = [item.detach().to(draw.dtype).requires_grad_() for item in (a_down, b_down)]
    return x, weight, bias, a_up, narrow[0], b_up, narrow[1], alpha
