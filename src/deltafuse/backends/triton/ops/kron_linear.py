"""A linear layer with a Kronecker path (LoKr), and that path alone.

y = x W^T + alpha (w1 (x) w2) x + bias. The kernels write C = bias + alpha (w1 (x) w2) x, then y = C + x W^T in one
product; backward writes C = alpha (w1 (x) w2)^T dY, then dX = C + dY W. A low-rank w1 is small and is multiplied out
first; w2 stays as it is. Three shapes of the path, none of which keeps anything of the layer's size:

chain   w2 = B A low-rank. Forward one launch, backward two (C; all factors' gradients). Saved: h (M m, r), g (M l, r).
pair    w1 and w2 full and small enough to stay on chip. Forward one launch, backward one.
mix     w2 full and large. x w2^T is a product of its own, of the layer's size for as long as the call runs; then one
        launch. Backward: that product again, one launch, and w2's two products.

Anything else (a side of w1 or a rank beyond 128, or 64 beside float16 and float32) runs the reference. w2 before w1 in
every shape: in pair and chain what lies between stays on chip, and in mix the sides of w1 are alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ....core.precision import accumulate_dtype, branch_dtype, compute_dtype
from ....primitives.gemm import plain_math
from ....primitives.kron import Chain
from ....primitives.kron import kron_apply as apply_reference
from ....primitives.kron import kron_linear as reference
from ..binding import Fused, bind
from ..kernels import kron_chain, kron_mix, kron_pair
from ..launch import rank_dtype
from . import common

SCHEMA = "Tensor x, Tensor? weight, Tensor? bias, Tensor w1, Tensor w2, Tensor? w2_up, float alpha"
SAVED = "Tensor x, Tensor? weight, Tensor? bias, Tensor w1, Tensor w2, Tensor? w2_up, Tensor h, Tensor g, float alpha"


def _result_dtype(x: Tensor, weight: Any) -> torch.dtype:
    return x.dtype if weight is not None else branch_dtype(x.dtype)


def forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, w1: Tensor, w2: Tensor, w2_up: Tensor | None, alpha: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(y (..., N), h (M m, r), g (M l, r)); h and g are empty where w2 is full."""
    flat, dtype = common.flat(x), _result_dtype(x, weight)
    h = g = None
    if w2_up is not None:
        h, g, y = kron_chain.apply(flat, w2, w1, w2_up, bias, alpha, True, dtype)
        assert y is not None
    elif kron_pair.fits((*w1.shape, *w2.shape), x.dtype, x.device):
        y = kron_pair.apply(flat, w1, w2, bias, alpha, dtype)
    else:
        y, _ = kron_mix.mix(_second(flat, w1, w2), w1, bias, alpha, dtype)
    if weight is not None:
        y.addmm_(flat, weight.t())
    empty = rank_dtype(x.dtype)
    return (
        y.view(*x.shape[:-1], y.shape[1]),
        x.new_empty((0,), dtype=empty) if h is None else h,
        x.new_empty((0,), dtype=empty) if g is None else g,
    )


def _second(flat: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """x w2^T on the (M m, n) view, as (M, m k) in the rank dtype."""
    work = rank_dtype(flat.dtype)
    lines = flat.reshape(-1, w2.shape[1]).to(work)
    with plain_math(flat):
        return torch.mm(lines, w2.to(work).t()).view(flat.shape[0], w1.shape[1] * w2.shape[0])


def fake(
    x: Tensor, weight: Any, bias: Any, w1: Tensor, w2: Tensor, w2_up: Any, alpha: float
) -> tuple[Tensor, Tensor, Tensor]:
    rows, work = x.numel() // x.shape[-1], rank_dtype(x.dtype)
    wide = w1.shape[0] * (w2 if w2_up is None else w2_up).shape[0]
    y = x.new_empty((*x.shape[:-1], wide), dtype=_result_dtype(x, weight))
    if w2_up is None:
        return y, x.new_empty((0,), dtype=work), x.new_empty((0,), dtype=work)
    rank = w2.shape[0]
    return y, x.new_empty((rows * w1.shape[1], rank), dtype=work), x.new_empty((rows * w1.shape[0], rank), dtype=work)


def save(args: Sequence[Any], outputs: Sequence[Tensor]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    *tensors, alpha = args
    return (*tensors, *outputs[1:]), (alpha,)


def backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, w1: Tensor, w2: Tensor, w2_up: Tensor | None,
    h: Tensor, g: Tensor, alpha: float, needs: Sequence[bool],
) -> tuple[Any, ...]:  # fmt: skip
    """Gradients of x, weight, bias, w1, w2 and w2_up, in the order of the arguments."""
    flat, dy = common.flat(x), common.flat(grad)
    wants = needs[0], needs[3], needs[4]
    if w2_up is not None:
        dx, dw1, dw2, dup = _chain_backward(dy, flat, w1, w2, w2_up, h, g, alpha, (*wants, needs[5]))
    elif kron_pair.fits((*w1.shape, *w2.shape), x.dtype, x.device):
        dx, dw1, dw2, dup = *_pair_backward(dy, flat, w1, w2, alpha, wants), None
    else:
        dx, dw1, dw2, dup = *_mix_backward(dy, flat, w1, w2, alpha, wants), None
    if dx is not None and weight is not None:
        dx.addmm_(dy, weight)
    dweight = dy.t() @ flat if needs[1] else None
    dbias = common.bias_grad(dy, bias, needs[2])
    return None if dx is None else dx.view(x.shape), dweight, dbias, dw1, dw2, dup, None


def _chain_backward(
    dy: Tensor, flat: Tensor, w1: Tensor, down: Tensor, up: Tensor, h: Tensor, g: Tensor, alpha: float,
    needs: tuple[bool, ...],
) -> tuple[Any, ...]:  # fmt: skip
    p, q, dx = kron_chain.apply(dy, down, w1, up, None, alpha, needs[0], flat.dtype, transposed=True)
    wants = needs[2], needs[1], needs[3]
    ddown, dw1, dup = kron_chain.gradients(dy, flat, h, g, p, q, down, w1, up, alpha, wants)
    return dx, dw1, ddown, dup


def _pair_backward(
    dy: Tensor, flat: Tensor, w1: Tensor, w2: Tensor, alpha: float, needs: tuple[bool, ...]
) -> tuple[Any, ...]:
    if not (needs[1] or needs[2]):
        return (kron_pair.apply(dy, w1, w2, None, alpha, flat.dtype, True) if needs[0] else None), None, None
    dx, dw1, dw2 = kron_pair.backward(dy, flat, w1, w2, alpha, needs[0], needs[1])
    return dx, dw1, dw2 if needs[2] else None


def _mix_backward(
    dy: Tensor, flat: Tensor, w1: Tensor, w2: Tensor, alpha: float, needs: tuple[bool, ...]
) -> tuple[Any, ...]:
    work = rank_dtype(flat.dtype)
    again = _second(flat, w1, w2) if needs[1] else None
    p, dw1 = kron_mix.mix(dy, w1.t(), None, alpha, work, again)
    lines = p.view(-1, w2.shape[0])
    dx = dw2 = None
    if needs[0]:
        dx = torch.mm(lines, w2.to(work)).view(flat.shape).to(flat.dtype)
    if needs[2]:
        dw2 = torch.mm(lines.t(), flat.reshape(-1, w2.shape[1]).to(work)).to(w2.dtype)
    return dx, dw1, dw2


def backward_fake(grad: Tensor, x: Tensor, *rest: Any) -> tuple[Any, ...]:
    weight, bias, w1, w2, w2_up, *_, needs = rest
    tensors = (x, weight, bias, w1, w2, w2_up, None)
    return common.empty_grads(tensors, needs)


_run = bind(Fused("kron_linear", SCHEMA, 3, forward, fake, save, SAVED, backward, backward_fake))


def _in_scope(x: Tensor, w1: Chain, w2: Chain) -> bool:
    rank = w2[0].shape[0] if len(w2) == 2 else 1
    sides = w1[-1].shape[0], w1[0].shape[1]
    return x.shape[-1] > 0 and kron_chain.in_scope(sides, rank, compute_dtype(x))


def _whole(w1: Chain, x: Tensor) -> Tensor:
    """w1 as one matrix."""
    if len(w1) == 1:
        return w1[0]
    down, up = w1
    work = accumulate_dtype(down, up)
    with plain_math(x):
        return up.to(work) @ down.to(work)


def _parts(w2: Chain) -> tuple[Tensor, Tensor | None]:
    return (w2[0], w2[1]) if len(w2) == 2 else (w2[0], None)


def kron_linear(x: Tensor, weight: Tensor, bias: Tensor | None, w1: Chain, w2: Chain, alpha: float = 1.0) -> Tensor:
    """The primitive of the same name."""
    if not _in_scope(x, w1, w2):
        return reference(x, weight, bias, w1, w2, alpha)
    work = compute_dtype(x)
    return _run(x.to(work), weight.to(work), bias, _whole(w1, x), *_parts(w2), float(alpha))


def kron_apply(x: Tensor, w1: Chain, w2: Chain, w1_first: bool, alpha: float = 1.0) -> Tensor:
    """The primitive of the same name, by the kernels of :func:`kron_linear`; they choose the order themselves."""
    if not _in_scope(x, w1, w2):
        return apply_reference(x, w1, w2, w1_first, alpha)
    work = compute_dtype(x)
    x = x if x.dtype == work else x.to(branch_dtype(work))  # float16 is widened in the kernels
    return _run(x, None, None, _whole(w1, x), *_parts(w2), float(alpha))
