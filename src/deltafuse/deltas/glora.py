"""GLoRA: y = W (x + s A1 A2 x) + s B1 B2 x + b, that is dW = s (W A1 A2 + B1 B2)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..core.cost import Cost
from ..core.geometry import LayerOp
from ..core.verdict import Verdict
from .base import Call, Delta, Scalar, acc
from .lowrank import LowRank


@dataclass
class Generalized(Delta):
    """prologue: LowRank over one group's input channels, up (in, r), down (r, in); epilogue: LowRank of the layer."""

    prologue: LowRank
    epilogue: LowRank
    row_mask: Tensor | None = None

    needs_weight = True

    def _prologue_op(self, op: LayerOp) -> LayerOp:
        ones = (1,) * len(op.kernel)
        zeros = (0,) * len(op.kernel)
        return LayerOp(op.inp, op.inp, ones, ones, zeros, ones, op.groups)

    def _shift(self, call: Call, strength: Scalar) -> Tensor:
        """s A1 A2 x, each convolution group through the same factors."""
        narrow = self.prologue
        if call.op.groups > 1:
            narrow = replace(narrow, up=narrow.up.repeat(call.op.groups, 1))
        inner = replace(call, op=self._prologue_op(call.op), weight=None, bias=None)
        return narrow.branch(inner, strength)

    def dense(self, weight: Tensor | None, op: LayerOp, strength: Scalar) -> Tensor:
        assert weight is not None
        up = self.prologue.factor(strength)
        wide = weight.to(acc(weight, up)).flatten(2) if op.is_conv else weight.to(acc(weight, up))[..., None]
        left = torch.einsum("oik,ir->ork", wide, up.to(wide.dtype))
        right = torch.einsum("ork,ri->oik", left, self.prologue.down_matrix().to(wide.dtype)).reshape(op.weight_shape)
        return self.mask_rows(right + self.epilogue.dense(None, op, strength).to(right.dtype))

    def branch(self, call: Call, strength: Scalar, base: Tensor | None = None) -> Tensor:
        shifted = call.base(self._shift(call, strength).to(call.x.dtype))
        return shifted + self.epilogue.branch(call, strength).to(shifted.dtype)

    def _whole(self, op: LayerOp) -> bool:
        """Whether one primitive runs all of the layer."""
        masks = self.prologue.per_sample or self.epilogue.per_sample
        return not (op.is_conv or masks or self.row_mask is not None)

    def bypass(self, call: Call, strength: Scalar) -> Tensor:
        if call.dropout or self.row_mask is not None:
            return super().bypass(call, strength)
        if call.op.is_conv:
            y = call.base(call.x + self._shift(call, strength).to(call.x.dtype))
            return call.with_bias(y + self.epilogue.branch(call, strength).to(y.dtype))
        if not self._whole(call.op):
            return super().bypass(call, strength)
        (a_up, first), (b_up, second) = self.prologue.parts(strength), self.epilogue.parts(strength)
        if first != second:
            a_up = a_up.to(acc(a_up)) * first
            b_up, second = b_up.to(acc(b_up)) * second, 1.0
        a_down, b_down = self.prologue.down_matrix(), self.epilogue.down_matrix()
        return call.kernels.glora_linear(call.x, call.weight, call.bias, a_up, a_down, b_up, b_down, second)

    def can_merge(self, op: LayerOp) -> Verdict:
        return self.epilogue.can_merge(op)

    def bypass_cost(self, op: LayerOp, rows: int, size: int) -> Cost:
        first = self.prologue.bypass_cost(self._prologue_op(op), rows, size)
        shift = Cost(bytes=3.0 * size * rows * op.inp, launches=1, saved=float(size) * rows * op.inp)
        return first + shift + self.epilogue.bypass_cost(op, rows, size)

    def dense_cost(self, op: LayerOp) -> Cost:
        rank = self.prologue.rank
        products = Cost(4.0 * op.out * op.fan_in * rank, 12.0 * op.out * op.fan_in, 3)
        return products + self.epilogue.dense_cost(op)

    def uses(self, op: LayerOp) -> tuple[str, ...]:
        return ("glora_linear",) if self._whole(op) else ()
