"""A linear layer with a scale g = 1 + m v on its output or input channels: IA3.

On the output: y0 = x W^T, y = g y0 + bias. Forward: the product and one pass (y0 read, y written). Backward: one pass
(dY and y0 read, G = g dY written, dv beside it), then dX = G W. Saved: y0, and no x. Where v wants no gradient, y takes
y0's memory and nothing of the layer's size is kept.

On the input: x' = g x, y = x' W^T + bias. Forward: one pass (x read, x' written) and the product. Backward:
dX' = dY W, then one pass (dX' and x read, dx written over dX', dv beside it). Saved: x.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ....core.precision import compute_dtype
from ....primitives.scaling import scaled_linear as reference
from ..binding import Fused, bind
from ..kernels import scale as passes
from . import common

SCHEMA = "Tensor x, Tensor weight, Tensor? bias, Tensor vector, float strength, bool keep"
SAVED = "Tensor? kept, Tensor weight, Tensor? bias, Tensor vector, float strength"
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def _bias_grad(dy: Tensor, bias: Tensor | None, needed: bool) -> Tensor | None:
    return dy.sum(0, dtype=torch.float32).to(bias.dtype) if needed and bias is not None else None


def _fake_grads(grad: Tensor, weight: Tensor, bias: Tensor | None, vector: Tensor, needs: Sequence[bool]) -> Any:
    dx = grad.new_empty((*grad.shape[:-1], weight.shape[1])) if needs[0] else None
    dbias = bias.new_empty(bias.shape) if needs[2] and bias is not None else None
    return dx, None, dbias, vector.new_empty(vector.shape) if needs[3] else None, None, None


# -- on the output ----------------------------------------------------------------------------------------------------


def forward_output(
    x: Tensor, weight: Tensor, bias: Tensor | None, vector: Tensor, strength: float, keep: bool
) -> tuple[Tensor, Tensor]:
    """(y (..., N), y0 (M, N), or an empty tensor where nothing is kept)."""
    base = torch.mm(common.flat(x), weight.t())
    y = passes.scale(base, vector, strength, True, bias, None if keep else base)
    return y.view(*x.shape[:-1], weight.shape[0]), base if keep else x.new_empty(0)


def fake_output(x: Tensor, weight: Tensor, bias: Any, vector: Any, strength: float, keep: bool) -> tuple[Any, ...]:
    wide = weight.shape[0]
    return x.new_empty((*x.shape[:-1], wide)), x.new_empty((x.numel() // x.shape[-1], wide) if keep else 0)


def save_output(args: Sequence[Any], outputs: Sequence[Tensor]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    _, weight, bias, vector, strength, keep = args
    return (outputs[1] if keep else None, weight, bias, vector), (strength,)


def backward_output(
    grad: Tensor, base: Tensor | None, weight: Tensor, bias: Tensor | None, vector: Tensor, strength: float,
    needs: Sequence[bool],
) -> tuple[Any, ...]:  # fmt: skip
    """Gradients of x, weight, bias and the vector, in the order of the arguments."""
    dy = common.flat(grad)
    scaled, dv = None, None
    if needs[3] and base is not None:
        scaled, dv = passes.scale_grad(dy, base, vector, strength, True, needs[0])
    elif needs[0]:
        scaled = passes.scale(dy, vector, strength, True, None)
    dx = None if scaled is None else torch.mm(scaled, weight).view(*grad.shape[:-1], weight.shape[1])
    return dx, None, _bias_grad(dy, bias, needs[2]), dv, None, None


def backward_output_fake(
    grad: Tensor, base: Any, weight: Tensor, bias: Any, vector: Tensor, _: float, needs: Any
) -> Any:
    return _fake_grads(grad, weight, bias, vector, needs)


# -- on the input -----------------------------------------------------------------------------------------------------


def forward_input(
    x: Tensor, weight: Tensor, bias: Tensor | None, vector: Tensor, strength: float, keep: bool
) -> tuple[Tensor]:
    """(y (..., N),)."""
    scaled = passes.scale(common.flat(x), vector, strength, True, None)
    y = F.linear(scaled, weight, None if bias is None else bias.to(x.dtype))
    return (y.view(*x.shape[:-1], weight.shape[0]),)


def fake_input(x: Tensor, weight: Tensor, *_: Any) -> tuple[Tensor]:
    return (x.new_empty((*x.shape[:-1], weight.shape[0])),)


def save_input(args: Sequence[Any], outputs: Sequence[Tensor]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    x, weight, bias, vector, strength, keep = args
    return (x if keep else None, weight, bias, vector), (strength,)


def backward_input(
    grad: Tensor, x: Tensor | None, weight: Tensor, bias: Tensor | None, vector: Tensor, strength: float,
    needs: Sequence[bool],
) -> tuple[Any, ...]:  # fmt: skip
    """Gradients of x, weight, bias and the vector, in the order of the arguments."""
    dy = common.flat(grad)
    dx, dv = None, None
    if needs[0] or needs[3]:
        shifted = torch.mm(dy, weight)
        if needs[3] and x is not None:
            dx, dv = passes.scale_grad(shifted, common.flat(x), vector, strength, True, needs[0], shifted)
        else:
            dx = passes.scale(shifted, vector, strength, True, None, shifted)
    if dx is not None:
        dx = dx.view(*grad.shape[:-1], weight.shape[1])
    return dx, None, _bias_grad(dy, bias, needs[2]), dv, None, None


def backward_input_fake(grad: Tensor, x: Any, weight: Tensor, bias: Any, vector: Tensor, _: float, needs: Any) -> Any:
    return _fake_grads(grad, weight, bias, vector, needs)


_on_output = bind(Fused("scaled_linear_output", SCHEMA, 2, forward_output, fake_output, save_output, SAVED,
                        backward_output, backward_output_fake))  # fmt: skip
_on_input = bind(Fused("scaled_linear_input", SCHEMA, 1, forward_input, fake_input, save_input, SAVED, backward_input,
                       backward_input_fake))  # fmt: skip


def scaled_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, vector: Tensor, strength: float = 1.0, on_input: bool = False
) -> Tensor:
    """The primitive of the same name; a trained weight or a float64 vector runs the reference."""
    work = compute_dtype(x)
    if weight.requires_grad or work not in _FLOATS or vector.dtype not in _FLOATS or vector.dim() != 1:
        return reference(x, weight, bias, vector, strength, on_input)
    keep = vector.requires_grad and torch.is_grad_enabled()
    run = _on_input if on_input else _on_output
    return run(x.to(work), weight.to(work), bias, vector, float(strength), keep)
