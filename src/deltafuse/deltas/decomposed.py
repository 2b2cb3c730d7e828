"""Weight decomposition (DoRA) over any delta.

W_dora = g M with M = W + dW and g = magnitude / |M|, per output row (axis 0) or per input column (axis 1).
Strength m: W' = W + m (W_dora - W). Forward, output axis: y = (1 + m (g - 1)) W x + m g dW x + b.
Input axis: y = W ((1 + m (g - 1)) x) + m dW (g x) + b. The bias is never scaled.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..core.cost import Cost
from ..core.geometry import LayerOp
from ..core.precision import branch_dtype, compute_dtype
from ..core.verdict import Verdict
from ..primitives import Kernels, kernel_table
from .base import Call, Delta, Scalar, acc, times
from .lowrank import Hadamard, LowRank

_REFERENCE = kernel_table()


@dataclass
class Decomposed(Delta):
    """inner: the delta inside the norm; magnitude (out,) or (in // groups,); detach: no gradient through the norm."""

    inner: Delta
    magnitude: Tensor
    axis: int
    detach: bool = False

    multiplicative = True
    needs_weight = True

    # the gain

    def norm(self, kernels: Kernels, weight: Tensor, op: LayerOp) -> Tensor:
        """|W + dW| along the axis, composed from factors where they allow it."""
        if self.detach:
            with torch.no_grad():
                return self._norm(kernels, weight, op)
        return self._norm(kernels, weight, op)

    def _norm(self, kernels: Kernels, weight: Tensor, op: LayerOp) -> Tensor:
        if self._composes(op):
            assert isinstance(self.inner, LowRank)
            up = self.inner.factor(1.0)
            if self.inner.row_mask is not None:
                up = up * self.inner.row_mask.to(up.dtype)[:, None]
            return kernels.norm_compose(weight.flatten(1), up, self.inner.down_matrix(), self.axis)
        return kernels.weight_norm(self.inner.merged(kernels, weight, op, 1.0), self.axis)

    def _composes(self, op: LayerOp) -> bool:
        inner = self.inner
        return isinstance(inner, LowRank) and inner.mid is None and (self.axis == 0 or op.window == 1)

    def gain(self, kernels: Kernels, weight: Tensor, op: LayerOp) -> Tensor:
        """g, float32 or better, (out,) or (in // groups,)."""
        norm = self.norm(kernels, weight, op)
        return self.magnitude.to(acc(self.magnitude, norm)).reshape(-1) / norm

    def _broadcast(self, gain: Tensor, op: LayerOp) -> Tensor:
        """g against the weight."""
        shape = [1] * len(op.weight_shape)
        shape[self.axis] = -1
        return gain.view(shape)

    # dense

    def can_merge(self, op: LayerOp) -> Verdict:
        return self.inner.can_merge(op)

    def can_bypass(self, op: LayerOp) -> Verdict:
        return self.inner.can_bypass(op)

    def dense(self, weight: Tensor | None, op: LayerOp, strength: Scalar) -> Tensor:
        assert weight is not None
        gain = self._broadcast(self.gain(_REFERENCE, weight, op), op)
        inner = self.inner.dense(weight, op, 1.0)
        return times((gain - 1) * weight.to(inner.dtype) + gain * inner, strength)

    def dense_bias(self, strength: Scalar) -> Tensor | None:
        return self.inner.dense_bias(strength)

    def dense_cost(self, op: LayerOp) -> Cost:
        """The inner delta, the norm, and the passes over float32 weights between them: 60 bytes an element, counted."""
        elements = op.out * op.fan_in
        return self.inner.dense_cost(op) + self._norm_cost(op) + Cost(4.0 * elements, 60.0 * elements, 10)

    # bypass: dropout acts inside the gain, on the inner delta's output, as it does in the plain adapter

    def contribution(self, call: Call, strength: Scalar, base: Tensor | None = None) -> Tensor:
        return self.branch(call, strength, base)

    def branch(self, call: Call, strength: Scalar, base: Tensor | None = None) -> Tensor:
        assert call.weight is not None
        gain = self.gain(call.kernels, call.weight, call.op)
        if self.axis == 0:
            return self._row_branch(call, gain, strength, call.base() if base is None else base)
        columns = call.op.channels(gain.repeat(call.op.groups))
        scaled = replace(call, x=call.kernels.channel_scale(call.x, columns))
        shifted = call.base(call.kernels.channel_scale(call.x, columns - 1))
        inner_base = scaled.base() if self.inner.multiplicative else None
        inner = call.drop(self.inner.masked_branch(scaled, 1.0, inner_base)).to(shifted.dtype)
        return times(shifted + inner, strength)

    def _row_branch(self, call: Call, gain: Tensor, strength: Scalar, base: Tensor) -> Tensor:
        rows = call.op.channels(gain)
        inner = call.drop(self.inner.masked_branch(call, 1.0, base))
        change = call.kernels.channel_scale(base, (rows - 1) * strength)
        return change + call.kernels.channel_scale(inner.to(base.dtype), rows * strength)

    def bypass(self, call: Call, strength: Scalar) -> Tensor:
        assert call.weight is not None
        gain = self.gain(call.kernels, call.weight, call.op)
        if self.axis == 1:
            return call.with_bias(self._bypass_columns(call, gain, strength))
        narrow = self._narrow(call)
        return (
            call.with_bias(self._bypass_rows(call, gain, strength))
            if narrow is None
            else self._bypass_linear(narrow, call, gain, strength)
        )

    def _narrow(self, call: Call) -> LowRank | None:
        """The inner delta as two factors of a linear layer, where nothing acts between them and the gain."""
        if call.op.is_conv or call.dropout or self.inner.row_mask is not None:
            return None
        return self.inner.narrow(call.kernels, branch_dtype(compute_dtype(call.x)))

    def _bypass_linear(self, inner: LowRank, call: Call, gain: Tensor, strength: Scalar) -> Tensor:
        """Base product, gain, low-rank path and bias as one primitive."""
        whole = isinstance(strength, (int, float)) and strength == 1
        kept = gain if whole else 1 + (gain - 1) * strength
        up, number = inner.parts(1.0)
        mask = inner.rank_mask if inner.per_sample else None
        down = inner.down_matrix()
        return call.kernels.lowrank_linear(
            call.x, call.weight, call.bias, down, up, number, kept, times(gain, strength), mask
        )

    def _bypass_rows(self, call: Call, gain: Tensor, strength: Scalar) -> Tensor:
        base = call.base()
        rows = call.op.channels(gain)
        kept = call.kernels.channel_scale(base, 1 + (rows - 1) * strength)
        if isinstance(self.inner, LowRank) and not call.dropout:
            return self.inner.scaled(0, gain, call.op).add_to(kept, call, strength)
        inner = call.drop(self.inner.masked_branch(call, 1.0, base)).to(base.dtype)
        return kept + call.kernels.channel_scale(inner, rows * strength)

    def _bypass_columns(self, call: Call, gain: Tensor, strength: Scalar) -> Tensor:
        columns = call.op.channels(gain.repeat(call.op.groups))
        base = call.base(call.kernels.channel_scale(call.x, 1 + (columns - 1) * strength))
        if isinstance(self.inner, LowRank) and not call.dropout:
            return self.inner.scaled(1, gain, call.op).add_to(base, call, strength)
        scaled = replace(call, x=call.kernels.channel_scale(call.x, columns))
        whole = isinstance(strength, (int, float)) and strength == 1
        inner_base = None if not self.inner.multiplicative else base if whole else scaled.base()
        inner = call.drop(self.inner.masked_branch(scaled, 1.0, inner_base)).to(base.dtype)
        return base + times(inner, strength)

    def bypass_cost(self, op: LayerOp, rows: int, size: int) -> Cost:
        inner = self.inner.bypass_cost(op, rows, size)
        channels = op.out if self.axis == 0 else op.inp
        scale = Cost(3.0 * rows * channels, 4.0 * size * rows * channels, 4, saved=2.0 * size * rows * channels)
        return inner + scale + self._norm_cost(op)

    def _norm_cost(self, op: LayerOp) -> Cost:
        if self._composes(op):
            assert isinstance(self.inner, LowRank)
            return Cost(2.0 * op.out * op.fan_in * self.inner.rank, 8.0 * op.out * op.fan_in, 8)
        return self.inner.dense_cost(op) + Cost(2.0 * op.out * op.fan_in, 12.0 * op.out * op.fan_in, 3)

    def uses(self, op: LayerOp) -> tuple[str, ...]:
        norm = "norm_compose" if self._composes(op) else "weight_norm"
        if self.axis == 0 and not op.is_conv and isinstance(self.inner, (LowRank, Hadamard)):
            return (*self.inner.uses(op), norm)
        return (*self.inner.uses(op), "channel_scale", norm, "gemm_epilogue")
