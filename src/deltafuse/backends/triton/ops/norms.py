"""Norms of a weight per row or column, and the DoRA gain over the norm of W + alpha up down.

Forward and backward: one launch each, a pass over W; ranks above 64 take one small launch more.
Saved: weight, factors, magnitude and norm; P (I, r) float32 where the factor that has the rows wants a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ....primitives import norms as references
from ..binding import Fused, bind
from ..kernels import norms as kernels
from ..launch import MAX_KERNEL_RANK
from . import common

GAIN_SCHEMA = "Tensor weight, Tensor up, Tensor down, float alpha, Tensor magnitude, int axis, bool slopes"
GAIN_SAVED = (
    "Tensor weight, Tensor up, Tensor down, Tensor magnitude, Tensor norm, Tensor? slope, float alpha, int axis"
)
COMPOSE_SCHEMA = "Tensor weight, Tensor up, Tensor down, int axis, bool slopes"
COMPOSE_SAVED = "Tensor weight, Tensor up, Tensor down, Tensor norm, Tensor? slope, int axis"


def _slope(found: kernels.Norms) -> Tensor:
    """P; an operator returns a tensor also where none was asked for."""
    return found.norm.new_empty(0) if found.slope is None else found.slope


def _fakes(weight: Tensor, rank: int, axis: int, slopes: bool, count: int) -> tuple[Tensor, ...]:
    size = weight.shape[axis]
    vectors = (weight.new_empty(size, dtype=torch.float32) for _ in range(count))
    return *vectors, weight.new_empty((size, rank) if slopes else 0, dtype=torch.float32)


# -- decomposition_gain


def gain_forward(
    weight: Tensor, up: Tensor, down: Tensor, alpha: float, magnitude: Tensor, axis: int, slopes: bool
) -> tuple[Tensor, ...]:
    """(gain, norm, P)."""
    found = kernels.compose(weight, up, down, alpha, magnitude.contiguous(), axis, slopes)
    assert found.gain is not None
    return found.gain, found.norm, _slope(found)


def gain_fake(
    weight: Tensor, up: Tensor, down: Tensor, alpha: float, magnitude: Tensor, axis: int, slopes: bool
) -> tuple[Tensor, ...]:
    return _fakes(weight, up.shape[1], axis, slopes, 2)


def gain_save(args: Sequence[Any], outputs: Sequence[Tensor]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    weight, up, down, alpha, magnitude, axis, slopes = args
    _, norm, slope = outputs
    return (weight, up, down, magnitude, norm, slope if slopes else None), (alpha, axis)


def gain_backward(
    grad: Tensor, weight: Tensor, up: Tensor, down: Tensor, magnitude: Tensor, norm: Tensor, slope: Tensor | None,
    alpha: float, axis: int, needs: Sequence[bool],
) -> tuple[Any, ...]:  # fmt: skip
    found = kernels.compose_backward(
        grad, weight, up, down, magnitude.contiguous(), norm, slope, alpha, axis, needs[1], needs[2], needs[4]
    )
    return None, found.up, found.down, None, found.magnitude, None, None


def gain_backward_fake(
    grad: Tensor, weight: Tensor, up: Tensor, down: Tensor, magnitude: Tensor, *rest: Any
) -> tuple[Any, ...]:
    needs = rest[-1]
    leaves = (None, up, down, None, magnitude, None, None)
    return common.empty_grads(leaves, needs)


_gain = bind(
    Fused("decomposition_gain", GAIN_SCHEMA, 3, gain_forward, gain_fake, gain_save, GAIN_SAVED, gain_backward,
          gain_backward_fake)
)  # fmt: skip


def decomposition_gain(weight: Tensor, up: Tensor, down: Tensor, alpha: float, magnitude: Tensor, axis: int) -> Tensor:
    """The primitive of the same name; a trained weight, float64 and a rank beyond the kernels' run the reference."""
    if _beyond(weight, up, down) or magnitude.dtype == torch.float64:
        return references.decomposition_gain(weight, up, down, alpha, magnitude, axis)
    return _gain(weight, up, down, float(alpha), magnitude, axis, (up, down)[axis].requires_grad)


def _beyond(weight: Tensor, up: Tensor, down: Tensor) -> bool:
    """What the kernels leave to the reference."""
    doubles = any(item.dtype == torch.float64 for item in (weight, up, down))
    return doubles or weight.requires_grad or not 0 < up.shape[1] <= MAX_KERNEL_RANK


# -- norm_compose


def compose_forward(weight: Tensor, up: Tensor, down: Tensor, axis: int, slopes: bool) -> tuple[Tensor, ...]:
    """(norm, P)."""
    found = kernels.compose(weight, up, down, 1.0, None, axis, slopes)
    return found.norm, _slope(found)


def compose_fake(weight: Tensor, up: Tensor, down: Tensor, axis: int, slopes: bool) -> tuple[Tensor, ...]:
    return _fakes(weight, up.shape[1], axis, slopes, 1)


def compose_save(args: Sequence[Any], outputs: Sequence[Tensor]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    weight, up, down, axis, slopes = args
    norm, slope = outputs
    return (weight, up, down, norm, slope if slopes else None), (axis,)


def compose_backward(
    grad: Tensor, weight: Tensor, up: Tensor, down: Tensor, norm: Tensor, slope: Tensor | None, axis: int,
    needs: Sequence[bool],
) -> tuple[Any, ...]:  # fmt: skip
    found = kernels.compose_backward(grad, weight, up, down, None, norm, slope, 1.0, axis, needs[1], needs[2], False)
    return None, found.up, found.down, None, None


def compose_backward_fake(grad: Tensor, weight: Tensor, up: Tensor, down: Tensor, *rest: Any) -> tuple[Any, ...]:
    needs = rest[-1]
    dup, ddown = (item.new_empty(item.shape) if need else None for item, need in ((up, needs[1]), (down, needs[2])))
    return None, dup, ddown, None, None


_compose = bind(
    Fused("norm_compose", COMPOSE_SCHEMA, 2, compose_forward, compose_fake, compose_save, COMPOSE_SAVED,
          compose_backward, compose_backward_fake)
)  # fmt: skip


def norm_compose(weight: Tensor, up: Tensor, down: Tensor, axis: int) -> Tensor:
    """The primitive of the same name; a trained weight, float64 and a rank beyond the kernels' run the reference."""
    if _beyond(weight, up, down):
        return references.norm_compose(weight, up, down, axis)
    return _compose(weight, up, down, axis, (up, down)[axis].requires_grad)


# -- weight_norm


def norm_forward(weight: Tensor, axis: int) -> tuple[Tensor]:
    return (kernels.dense(weight, axis),)


def norm_fake(weight: Tensor, axis: int) -> tuple[Tensor]:
    return (weight.new_empty(weight.shape[axis], dtype=torch.float32),)


def norm_save(args: Sequence[Any], outputs: Sequence[Tensor]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    weight, axis = args
    return (weight, outputs[0]), (axis,)


def norm_backward(grad: Tensor, weight: Tensor, norm: Tensor, axis: int, needs: Sequence[bool]) -> tuple[Any, ...]:
    return (kernels.dense_backward(grad, weight, norm, axis) if needs[0] else None), None


def norm_backward_fake(grad: Tensor, weight: Tensor, norm: Tensor, axis: int, needs: Sequence[bool]) -> tuple[Any, ...]:
    return (weight.new_empty(weight.shape) if needs[0] else None), None


_norm = bind(
    Fused("weight_norm", "Tensor weight, int axis", 1, norm_forward, norm_fake, norm_save,
          "Tensor weight, Tensor norm, int axis", norm_backward, norm_backward_fake)
)  # fmt: skip


def weight_norm(weight: Tensor, axis: int) -> Tensor:
    """The primitive of the same name; float64 and vectors run the reference."""
    if weight.dtype == torch.float64 or weight.dim() < 2:
        return references.weight_norm(weight, axis)
    return _norm(weight, axis)
