"""Whole adapted linear layers as single primitives, so that a backend can share one pass over x and over dY.

lowrank_linear: y = gain (x W^T) + drop(up_gain alpha (mask (x A^T)) B^T) + bias.
columns_linear: y = (gain x) W^T + alpha (mask ((down_gain x) A^T)) B^T + bias.
x (..., K), W (N, K), bias (N,), A (r, K), B (N, r), gain and up_gain (N,), or gain and down_gain (K,), mask (batch, r)
for x of (batch, ..., K). drop: dropout of probability p with the mask that a seed stands for, see dropout.py.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..core.precision import accumulate_dtype
from .dropout import checked, keep_mask, keep_scale
from .examples import Draw, Sizes, example, floor
from .gemm import add_product, gemm_epilogue, product
from .lowrank import lowrank_down
from .registry import primitive
from .scaling import channel_scale


@primitive("y = gain (x W^T) + drop(up_gain alpha (x A^T) B^T) + bias")
def lowrank_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    down: Tensor,
    up: Tensor,
    alpha: float = 1.0,
    gain: Tensor | None = None,
    up_gain: Tensor | None = None,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    seed: Tensor | None = None,
) -> Tensor:
    """See the module's formula. gain and up_gain come together (DoRA) or not at all; mask is one row per sample.

    seed: one int64 on x's device, needed where dropout is not zero.
    """
    h = _rank_masked(lowrank_down(x, down), mask)
    dropout, seed = checked(dropout, seed)
    if seed is not None:
        return _dropped(gemm_epilogue(x, weight, None, None, None), bias, h, up, alpha, gain, up_gain, dropout, seed)
    if gain is None or up_gain is None:
        return gemm_epilogue(x, weight, bias, h, up, alpha)
    base = channel_scale(gemm_epilogue(x, weight, None, None, None), gain)
    work = accumulate_dtype(up, up_gain)
    y = add_product(base, h, up.to(work) * up_gain.to(work)[:, None], alpha)
    return y if bias is None else y + bias.to(y.dtype)


def _dropped(
    base: Tensor, bias: Tensor | None, h: Tensor, up: Tensor, alpha: float, gain: Tensor | None,
    up_gain: Tensor | None, dropout: float, seed: Tensor,
) -> Tensor:  # fmt: skip
    """gain base + drop(up_gain alpha h up^T) + bias."""
    up = up.to(accumulate_dtype(up)) * (alpha * keep_scale(dropout))
    if gain is not None and up_gain is not None:
        base = channel_scale(base, gain)
        up = up * up_gain.to(accumulate_dtype(up, up_gain))[:, None]
    branch = product(h, up.to(h.dtype))
    width = branch.shape[-1]
    keep = keep_mask(seed, branch.numel() // width, width, dropout).view(branch.shape)
    y = (base + branch.masked_fill(~keep, 0.0)).to(base.dtype)
    return y if bias is None else y + bias.to(y.dtype)


def _rank_masked(h: Tensor, mask: Tensor | None) -> Tensor:
    return h if mask is None else h * mask.to(h.dtype).view(mask.shape[0], *(1,) * (h.dim() - 2), mask.shape[1])


@primitive("y = (gain x) W^T + alpha ((down_gain x) A^T) B^T + bias")
def columns_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    down: Tensor,
    up: Tensor,
    alpha: float,
    gain: Tensor,
    down_gain: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """See the module's formula. down_gain None: the same as gain; mask is one row per sample."""
    inner = gain if down_gain is None else down_gain
    work = accumulate_dtype(down, inner)
    h = _rank_masked(lowrank_down(x, down.to(work) * inner.to(work)), mask)
    return gemm_epilogue(channel_scale(x, gain), weight, bias, h, up, alpha)


def _linear(sizes: Sizes, draw: Draw) -> tuple[Any, ...]:
    bias = draw.data(sizes.out, grad=False)
    x = draw.data(*sizes.lead, sizes.inner)
    return x, draw.weight(sizes.out, sizes.inner), bias


def _factors(sizes: Sizes, draw: Draw) -> tuple[Tensor, Tensor]:
    return draw.factor(sizes.rank, sizes.inner, scale=sizes.inner**-0.5), draw.factor(sizes.out, sizes.rank)


@example("lowrank_linear", "plain")
def _plain(sizes: Sizes, draw: Draw) -> tuple[Any, ...]:
    x, weight, _ = _linear(sizes, draw)
    return x, weight, None, *_factors(sizes, draw), 0.7, None, None, None


@example("lowrank_linear", "bias")
def _bias(sizes: Sizes, draw: Draw) -> tuple[Any, ...]:
    return *_linear(sizes, draw), *_factors(sizes, draw), -0.3, None, None, None


@example("lowrank_linear", "bias, rank mask per sample")
def _masked(sizes: Sizes, draw: Draw) -> tuple[Any, ...]:
    mask = draw.mask(sizes.lead[0], sizes.rank)
    return *_linear(sizes, draw), *_factors(sizes, draw), 0.7, None, None, mask


@example("lowrank_linear", "gain")
def _gained(sizes: Sizes, draw: Draw) -> tuple[Any, ...]:
    x, weight, _ = _linear(sizes, draw)
    gains = draw.positive(sizes.out), draw.positive(sizes.out)
    return x, weight, None, *_factors(sizes, draw), 0.7, *gains, None


@example("lowrank_linear", "bias, gain")
def _bias_gained(sizes: Sizes, draw: Draw) -> tuple[Any, ...]:
    gains = draw.positive(sizes.out), draw.positive(sizes.out)
    return *_linear(sizes, draw), *_factors(sizes, draw), 0.7, *gains, None


@example("lowrank_linear", "bias, dropout")
def _dropout(sizes: Sizes, draw: Draw) -> tuple[Any, ...]:
    return *_linear(sizes, draw), *_factors(sizes, draw), 0.7, None, None, None, 0.3, draw.drop_seed()


@example("lowrank_linear", "bias, dropout, gain, rank mask per sample")
def _dropout_gained(sizes: Sizes, draw: Draw) -> tuple[Any, ...]:
    gains = draw.positive(sizes.out), draw.positive(sizes.out)
    mask = draw.mask(sizes.lead[0], sizes.rank)
    return *_linear(sizes, draw), *_factors(sizes, draw), 0.7, *gains, mask, 0.1, draw.drop_seed()


@example("columns_linear", "one gain")
def _columns(sizes: Sizes, draw: Draw) -> tuple[Any, ...]:
    x, weight, _ = _linear(sizes, draw)
    return x, weight, None, *_factors(sizes, draw), 0.7, draw.positive(sizes.inner), None, None


@example("columns_linear", "bias, two gains, rank mask per sample")
def _columns_two(sizes: Sizes, draw: Draw) -> tuple[Any, ...]:
    gains = draw.positive(sizes.inner), draw.positive(sizes.inner)
    mask = draw.mask(sizes.lead[0], sizes.rank)
    return *_linear(sizes, draw), *_factors(sizes, draw), -0.3, *gains, mask


@floor("columns_linear")
@floor("lowrank_linear")
def _least(sizes: Sizes, width: int) -> tuple[float, float]:
    """Forward x and W in, y out; backward dY, x and W in, dX out. The base product twice, the thin ones six times."""
    rows, inner, out = sizes.rows, sizes.inner, sizes.out
    moved = width * (3 * rows * inner + 2 * rows * out + 2 * inner * out)
    return float(moved), float(4 * rows * inner * out + 6 * rows * sizes.rank * (inner + out))
