"""Kronecker primitives.

kron_apply: y = alpha (w1 (x) w2) x for x (..., in_m * in_n) -> (..., out_l * out_k), as vec(w1 X w2^T).
kron_linear: y = x W^T + alpha (w1 (x) w2) x + bias.
kron_merge: [W +] scale w1 (x) w2 -> (out_l * out_k, in_m * in_n, *k) in float32 or better.

w1 and w2 are chains of matrices applied left to right: (w,) for a full factor, (down, up) for up @ down.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.factorize import factorization
from ..core.precision import accumulate_dtype, branch_dtype, compute_dtype
from .examples import Draw, Sizes, example
from .gemm import gemm_epilogue, plain_math, product
from .registry import primitive

Chain = tuple[Tensor, ...]


def _chain(x: Tensor, factors: Chain) -> Tensor:
    """x times each factor's transpose in turn, along the last axis."""
    for factor in factors:
        x = product(x, factor.to(x.dtype))
    return x


def scaled(factors: Chain, scale: Any) -> Chain:
    """The chain with ``scale`` in its last matrix, float32 or better."""
    *rest, last = factors
    if isinstance(scale, (int, float)) and scale == 1:
        return factors
    return (*rest, last.to(accumulate_dtype(last)) * scale)


def w1_comes_first(w1: Chain, w2: Chain) -> bool:
    """Contraction order by multiply-adds per row."""
    inner, outer = (sum(matrix.shape[0] * matrix.shape[1] for matrix in chain) for chain in (w1, w2))
    (out_l, in_m), (out_k, in_n) = ((chain[-1].shape[0], chain[0].shape[1]) for chain in (w1, w2))
    return in_n * inner + out_l * outer < in_m * outer + out_k * inner


@primitive("y = alpha (w1 (x) w2) x, either factor low-rank and never rebuilt")
def kron_apply(x: Tensor, w1: Chain, w2: Chain, w1_first: bool, alpha: float = 1.0) -> Tensor:
    """w1 maps in_m -> out_l, w2 maps in_n -> out_k; ``w1_first`` is the contraction order.

    In float32 for float16 inputs, else in the compute dtype.
    """
    in_m, in_n = w1[0].shape[1], w2[0].shape[1]
    grid = x.to(branch_dtype(compute_dtype(x))).unflatten(-1, (in_m, in_n))
    w1 = scaled(w1, alpha)
    with plain_math(x):
        if not w1_first:
            grid = _chain(grid, w2)
        grid = _chain(grid.transpose(-1, -2), w1).transpose(-1, -2)
        if w1_first:
            grid = _chain(grid, w2)
    return grid.flatten(-2)


@primitive("y = x W^T + alpha (w1 (x) w2) x + bias, either factor low-rank")
def kron_linear(x: Tensor, weight: Tensor, bias: Tensor | None, w1: Chain, w2: Chain, alpha: float = 1.0) -> Tensor:
    """x (..., in_m in_n), W (out_l out_k, in_m in_n); the cheaper contraction order. Output in W x's dtype."""
    y = gemm_epilogue(x, weight, bias, None, None)
    return (y + kron_apply(x, w1, w2, w1_comes_first(w1, w2), alpha)).to(y.dtype)


@primitive("[W +] scale w1 (x) w2, with the window axes of w2 kept")
def kron_merge(weight: Tensor | None, w1: Tensor, w2: Tensor, scale: Any = 1.0) -> Tensor:
    """w1 (l, m), w2 (k, n, *window) -> (l k, m n, *window); W of that shape. scale: a number or a 0-d tensor."""
    work = accumulate_dtype(weight, w1, w2)
    window = w2.shape[2:]
    out, inp = w1.shape[0] * w2.shape[0], w1.shape[1] * w2.shape[1]
    (left,) = scaled((w1.to(work),), scale)
    dense = torch.einsum("lm,knw->lkmnw", left, w2.to(work).flatten(2) if window else w2.to(work)[..., None])
    dense = dense.reshape(out, inp, *window)
    return dense if weight is None else weight.to(work) + dense


# -- examples ---------------------------------------------------------------------------------------------------------


def _factors(sizes: Sizes, draw: Draw, low1: bool, low2: bool) -> tuple[Chain, Chain]:
    (in_m, in_n), (out_l, out_k) = factorization(sizes.inner, sizes.factor), factorization(sizes.out, sizes.factor)
    chains: list[Chain] = []
    for out, inp, low in ((out_l, in_m, low1), (out_k, in_n, low2)):
        if low:
            down = draw.factor(sizes.rank, inp, scale=inp**-0.5)
            chains.append((down, draw.factor(out, sizes.rank, scale=sizes.rank**-0.5)))
        else:
            chains.append((draw.factor(out, inp, scale=inp**-0.5),))
    return chains[0], chains[1]


def _call(sizes: Sizes, draw: Draw, bias: bool, low1: bool, low2: bool) -> tuple[Any, ...]:
    x = draw.data(*sizes.lead, sizes.inner)
    shift = draw.data(sizes.out, grad=False) if bias else None
    return x, draw.weight(sizes.out, sizes.inner), shift, *_factors(sizes, draw, low1, low2)


@example("kron_linear", "both full, bias")
def _full(sizes: Sizes, draw: Draw) -> tuple[Any, ...]:
    return *_call(sizes, draw, True, False, False), 0.7


@example("kron_linear", "both full")
def _full_plain(sizes: Sizes, draw: Draw) -> tuple[Any, ...]:
    return *_call(sizes, draw, False, False, False), 1.0


@example("kron_linear", "w2 low-rank, bias")
def _low2(sizes: Sizes, draw: Draw) -> tuple[Any, ...]:
    return *_call(sizes, draw, True, False, True), -0.3


@example("kron_linear", "w2 low-rank")
def _low2_plain(sizes: Sizes, draw: Draw) -> tuple[Any, ...]:
    return *_call(sizes, draw, False, False, True), 0.7


@example("kron_linear", "w1 low-rank")
def _low1(sizes: Sizes, draw: Draw) -> tuple[Any, ...]:
    return *_call(sizes, draw, False, True, False), 0.7


@example("kron_linear", "both low-rank, bias")
def _low_both(sizes: Sizes, draw: Draw) -> tuple[Any, ...]:
    return *_call(sizes, draw, True, True, True), 0.7


@example("kron_apply", "both full")
def _apply_full(sizes: Sizes, draw: Draw) -> tuple[Any, ...]:
    x, _, _, *factors = _call(sizes, draw, False, False, False)
    return x, *factors, False, 0.7


@example("kron_apply", "w2 low-rank")
def _apply_low(sizes: Sizes, draw: Draw) -> tuple[Any, ...]:
    x, _, _, *factors = _call(sizes, draw, False, False, True)
    return x, *factors, True, 1.0


def _merge_factors(sizes: Sizes, draw: Draw, window: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    (in_m, in_n), (out_l, out_k) = factorization(sizes.inner, sizes.factor), factorization(sizes.out, sizes.factor)
    return draw.factor(out_l, in_m, scale=1.0), draw.factor(out_k, in_n, *window)


@example("kron_merge", "onto a weight")
def _merge_weight(sizes: Sizes, draw: Draw) -> tuple[Any, ...]:
    return draw.weight(sizes.out, sizes.inner), *_merge_factors(sizes, draw, ()), 0.7


@example("kron_merge", "alone, window")
def _merge_window(sizes: Sizes, draw: Draw) -> tuple[Any, ...]:
    return None, *_merge_factors(sizes, draw, (3, 2)), -0.5
