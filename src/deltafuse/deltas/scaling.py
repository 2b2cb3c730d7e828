"""Channel scales (IA3) and dense deltas (full)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.cost import Cost
from ..core.geometry import LayerOp
from ..primitives import Kernels
from .base import Call, Delta, Scalar, acc, product_cost, times


@dataclass
class ChannelScale(Delta):
    """W' = (1 + m v) W per output row, or per input column: v (out,) or (in,)."""

    vector: Tensor
    on_input: bool
    row_mask: Tensor | None = None

    needs_weight = True

    @property
    def multiplicative(self) -> bool:  # type: ignore[override]
        return not self.on_input

    def dense(self, weight: Tensor | None, op: LayerOp, strength: Scalar) -> Tensor:
        assert weight is not None
        wide = weight.to(acc(weight, self.vector))
        vector = self.vector.to(wide.dtype) * strength
        if not self.on_input:
            return self.mask_rows(wide * vector.view(-1, *(1,) * (wide.dim() - 1)))
        columns = vector.view(op.groups, 1, -1, *(1,) * len(op.kernel))
        return self.mask_rows((wide.unflatten(0, (op.groups, -1)) * columns).flatten(0, 1))

    def branch(self, call: Call, strength: Scalar, base: Tensor | None = None) -> Tensor:
        vector = call.op.channels(self.vector.to(acc(self.vector))) * strength
        if self.on_input:
            return call.base(call.kernels.channel_scale(call.x, vector))
        return call.kernels.channel_scale(call.base() if base is None else base, vector)

    def bypass(self, call: Call, strength: Scalar) -> Tensor:
        if call.dropout or self.row_mask is not None:
            return super().bypass(call, strength)
        if not call.op.is_conv:
            return self._bypass_linear(call, strength)
        vector = 1 + call.op.channels(self.vector.to(acc(self.vector))) * strength
        if self.on_input:
            return call.with_bias(call.base(call.kernels.channel_scale(call.x, vector)))
        return call.with_bias(call.kernels.channel_scale(call.base(), vector))

    def _bypass_linear(self, call: Call, strength: Scalar) -> Tensor:
        """The product, the scale and the bias as one primitive; a plain strength rides along, a tensor is folded in."""
        plain = isinstance(strength, (int, float))
        vector = self.vector if plain else self.vector.to(acc(self.vector)) * strength
        number = float(strength) if plain else 1.0
        return call.kernels.scaled_linear(call.x, call.weight, call.bias, vector, number, self.on_input)

    def bypass_cost(self, op: LayerOp, rows: int, size: int) -> Cost:
        channels = op.inp if self.on_input else op.out
        return Cost(float(rows) * channels, 2.0 * size * rows * channels, 3, saved=float(size) * rows * channels)

    def dense_cost(self, op: LayerOp) -> Cost:
        return Cost(float(op.out) * op.fan_in, 12.0 * op.out * op.fan_in, 2)

    def uses(self, op: LayerOp) -> tuple[str, ...]:
        return ("channel_scale",) if op.is_conv or self.row_mask is not None else ("scaled_linear", "channel_scale")


@dataclass
class Dense(Delta):
    """dW = diff, db = diff_bias: as large as the layer, so one merged product is its cheapest exact form."""

    diff: Tensor
    diff_bias: Tensor | None = None
    row_mask: Tensor | None = None

    def dense(self, weight: Tensor | None, op: LayerOp, strength: Scalar) -> Tensor:
        return self.mask_rows(times(self.diff.to(acc(self.diff, weight)), strength).view(op.weight_shape))

    def dense_bias(self, strength: Scalar) -> Tensor | None:
        if self.diff_bias is None:
            return None
        bias = times(self.diff_bias.to(acc(self.diff_bias)), strength)
        return bias if self.row_mask is None else bias * self.row_mask.to(bias.dtype)

    def merged(self, kernels: Kernels, weight: Tensor, op: LayerOp, strength: Scalar) -> Tensor:
        if self.row_mask is not None:
            return super().merged(kernels, weight, op, strength)
        return kernels.scaled_add(weight, self.diff.view(op.weight_shape), strength)

    def merged_to(self, kernels: Kernels, weight: Tensor, op: LayerOp, strength: Scalar, dtype: torch.dtype) -> Tensor:
        if self.row_mask is not None:
            return super().merged_to(kernels, weight, op, strength, dtype)
        return kernels.scaled_add(weight, self.diff.view(op.weight_shape), strength, dtype).to(dtype)

    def branch(self, call: Call, strength: Scalar, base: Tensor | None = None) -> Tensor:
        return call.op.apply(call.x, times(self.diff.to(call.x.dtype), strength).view(call.op.weight_shape))

    def bypass_cost(self, op: LayerOp, rows: int, size: int) -> Cost:
        return product_cost(rows, op.fan_in * op.groups, op.out, size)

    def dense_cost(self, op: LayerOp) -> Cost:
        return Cost(2.0 * op.out * op.fan_in, 12.0 * op.out * op.fan_in, 1)

    def merge_uses(self, op: LayerOp) -> tuple[str, ...]:
        return () if self.row_mask is not None else ("scaled_add",)
