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
_COMPOSED_RANK = 256
"""A product of two deltas of rank r is one of rank r^2; up to here its norm costs less composed than built."""


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

    def gain(self, kernels: Kernels, weight: Tensor, op: LayerOp) -> Tensor:
        """g, float32 or better, (out,) or (in // groups,)."""
        if self._composes(op):
            return self._composed_gain(kernels, weight, self.inner.narrow(kernels))
        norm = self._dense_norm(kernels, weight, op)
        return self.magnitude.to(acc(self.magnitude, norm)).reshape(-1) / norm

    def _composed_gain(self, kernels: Kernels, weight: Tensor, inner: LowRank) -> Tensor:
        """g from W and the inner delta's factors: nothing of the weight's size is built."""
        up, number = inner.parts(1.0)
        down = inner.down_matrix()
        if inner.row_mask is not None:
            up = up * inner.row_mask.to(up.dtype)[:, None]
        if self.detach:
            up, down = up.detach(), down.detach()
        return kernels.decomposition_gain(weight.flatten(1), up, down, number, self.magnitude, self.axis)

    def _dense_norm(self, kernels: Kernels, weight: Tensor, op: LayerOp) -> Tensor:
        if self.detach:
            with torch.no_grad():
                return kernels.weight_norm(self.inner.merged(kernels, weight, op, 1.0), self.axis)
        return kernels.weight_norm(self.inner.merged(kernels, weight, op, 1.0), self.axis)

    def _composes(self, op: LayerOp) -> bool:
        """Whether the inner delta is two factors of the flat weight, and few enough ranks."""
        rank = self._inner_rank()
        return rank is not None and (self.axis == 0 or op.window == 1)

    def _inner_rank(self) -> int | None:
        """The rank of the inner delta's factors, or None where its norm has to be taken of the built weight."""
        inner = self.inner
        if isinstance(inner, LowRank):
            return inner.rank if inner.mid is None else None
        if isinstance(inner, Hadamard) and inner.mid1 is None and inner.up1.shape[1] ** 2 <= _COMPOSED_RANK:
            return inner.up1.shape[1] ** 2
        return None

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
        narrow = self._narrow(call)
        if narrow is not None:
            return self._bypass_linear(narrow, call, strength)
        gain = self.gain(call.kernels, call.weight, call.op)
        run = self._bypass_rows if self.axis == 0 else self._bypass_columns
        return call.with_bias(run(call, gain, strength))

    def _narrow(self, call: Call) -> LowRank | None:
        """The inner delta as two factors of a linear layer, where nothing acts between them and the gain but dropout
        that the layer's primitive makes itself."""
        inside = not call.dropout or (self.axis == 0 and call.drops_inside)
        if call.op.is_conv or self.inner.row_mask is not None or not inside:
            return None
        return self.inner.narrow(call.kernels, branch_dtype(compute_dtype(call.x)))

    def _bypass_linear(self, inner: LowRank, call: Call, strength: Scalar) -> Tensor:
        """Base product, gain, low-rank path and bias as one primitive; norm and path share the factors."""
        assert call.weight is not None
        if self.axis == 0 and self._composes(call.op) and not call.dropout:
            up, number = inner.parts(1.0)
            mask = inner.rank_mask if inner.per_sample else None
            layer = (call.x, call.weight, call.bias, inner.down_matrix(), up, number, self.magnitude)
            return call.kernels.decomposed_linear(*layer, strength, self.detach, mask)
        if self._composes(call.op):
            gain = self._composed_gain(call.kernels, call.weight, inner)
        else:
            gain = self.gain(call.kernels, call.weight, call.op)
        whole = isinstance(strength, (int, float)) and strength == 1
        kept = gain if whole else 1 + (gain - 1) * strength
        up, number = inner.parts(1.0)
        mask = inner.rank_mask if inner.per_sample else None
        layer = (call.x, call.weight, call.bias, inner.down_matrix(), up, number, kept)
        if self.axis == 0:
            return call.kernels.lowrank_linear(*layer, times(gain, strength), mask, *call.drop_arguments())
        return call.kernels.columns_linear(*layer, None if whole else gain * strength, mask)

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
        rank = self._inner_rank()
        if rank is not None and self._composes(op):
            return Cost(2.0 * op.out * op.fan_in * rank, 8.0 * op.out * op.fan_in, 8)
        return self.inner.dense_cost(op) + Cost(2.0 * op.out * op.fan_in, 12.0 * op.out * op.fan_in, 3)

    def uses(self, op: LayerOp) -> tuple[str, ...]:
        if self.axis == 0 and self._composes(op) and not op.is_conv:
            return (*self.inner.uses(op), "decomposed_linear", "decomposition_gain")
        norm = ("decomposition_gain",) if self._composes(op) else ("weight_norm", *self.inner.merge_uses(op))
        inner = self.inner.uses(op)
        if op.is_conv or not isinstance(self.inner, (LowRank, Hadamard)):
            return (*inner, "channel_scale", "gemm_epilogue", *norm)
        if self.axis == 1:
            inner = tuple("columns_linear" if item == "lowrank_linear" else item for item in inner)
        return (*inner, *norm)
