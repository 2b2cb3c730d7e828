"""What the functional modules share: geometry from call arguments, the kernel table, and one way to run a delta."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..backends import select
from ..core.errors import OptionError, unknown_name
from ..core.geometry import LayerOp
from ..core.policy import requested_backend
from ..core.precision import compute_dtype
from ..core.problem import Problem
from ..deltas import Call, Delta
from ..deltas.base import Scalar
from ..primitives import Kernels

_CONV_OPTIONS = ("dilation", "groups", "padding", "stride")


def promoted(*tensors: Tensor | None) -> torch.dtype:
    """The dtype PyTorch gives a product of ``tensors``."""
    present = [tensor.dtype for tensor in tensors if tensor is not None]
    result = present[0]
    for dtype in present[1:]:
        result = torch.promote_types(result, dtype)
    return result


def layer_op(weight_shape: Sequence[int], extra_args: Mapping[str, Any] | None = None) -> LayerOp:
    """The layer with a weight ``weight_shape`` (out, in // groups, *kernel) and the options of ``F.conv1d/2d/3d``."""
    out, inp, *kernel = weight_shape
    options = dict(extra_args or {})
    if not kernel:
        if options:
            raise OptionError(f"a linear layer takes no convolution options, got {', '.join(sorted(options))}")
        return LayerOp(out, inp)
    for name in options:
        if name not in _CONV_OPTIONS:
            raise OptionError(unknown_name("convolution option", name, _CONV_OPTIONS))
    groups = int(options.get("groups", 1))
    padding = options.get("padding", 0)
    return LayerOp(
        out=out,
        inp=inp * groups,
        kernel=tuple(kernel),
        stride=_per_axis(options.get("stride", 1), len(kernel)),
        padding=padding if isinstance(padding, str) else _per_axis(padding, len(kernel)),
        dilation=_per_axis(options.get("dilation", 1), len(kernel)),
        groups=groups,
    )


def _per_axis(value: int | Sequence[int], axes: int) -> tuple[int, ...]:
    values = (value,) * axes if isinstance(value, int) else tuple(value)
    return values * axes if len(values) == 1 else values


def kernels_for(names: tuple[str, ...], op: LayerOp, like: Tensor, backend: str | None, rows: int = 1) -> Kernels:
    """The table that runs ``names`` on ``like``'s device and dtype; a named backend that cannot raises BackendError."""
    problem = Problem(op, rows.bit_length(), like.dtype, like.device, torch.is_grad_enabled())
    return select(names, problem, requested_backend(backend)).kernels


def branch(delta: Delta, x: Tensor, op: LayerOp, gamma: Scalar, names: tuple[str, ...], backend: str | None) -> Tensor:
    """gamma * dW x in the dtype the layer itself would give, by the cheaper of the delta's own path and a dense dW."""
    rows = op.rows(x)
    kernels = kernels_for(names, op, x, backend, rows)
    dtype = compute_dtype(x)
    if delta.can_bypass(op) and not _dense_is_cheaper(delta, op, rows, x.element_size()):
        return delta.branch(Call(kernels, op, x, None, None), gamma).to(dtype)
    return op.apply(x, delta.dense(None, op, gamma).to(x.dtype)).to(dtype)


def _dense_is_cheaper(delta: Delta, op: LayerOp, rows: int, size: int) -> bool:
    dense = delta.dense_cost(op).flops + 2.0 * rows * op.out * op.fan_in
    return delta.bypass_cost(op, rows, size).flops > dense
