"""Low-rank deltas: LoRA, LoCon, DyLoRA and T-LoRA as one; LoHa through its Khatri-Rao factors.

LowRank: dW = s up down (linear), the same as matrices for a convolution, or the Tucker form
dW[o, i, k] = s sum_pq up[o, p] mid[p, q, k] down[q, i].
Hadamard: dW = s (up1 down1) * (up2 down2), which is a LowRank of rank r^2 without being rebuilt.

A Tucker core folds into the down factor, mid x down, so that every merge is one low-rank product written once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..core.cost import Cost
from ..core.geometry import LayerOp
from ..core.precision import branch_dtype, compute_dtype
from ..core.verdict import Verdict
from ..primitives import Kernels, lowrank
from ..primitives.gemm import add_product, plain_math
from .base import YES, Call, Delta, Scalar, acc, product_cost, times


@dataclass
class LowRank(Delta):
    """down (r, fan_in) or (r, in, *kernel), up (out, r), mid (r, r, *kernel) or None, scale: alpha / rank.

    gain: learnable scalar or None. rank_mask: (r,), or (batch, r) for one mask per sample (bypass form only).
    """

    down: Tensor
    up: Tensor
    scale: float
    mid: Tensor | None = None
    gain: Tensor | None = None
    rank_mask: Tensor | None = None
    row_mask: Tensor | None = None

    @property
    def rank(self) -> int:
        return self.up.shape[1]

    @property
    def per_sample(self) -> bool:
        return self.rank_mask is not None and self.rank_mask.dim() == 2

    def narrow(self, kernels: Kernels | None = None, dtype: torch.dtype | None = None) -> LowRank | None:
        return None if self.mid is not None else self

    def parts(self, strength: Scalar) -> tuple[Tensor, float]:
        """(up with every tensor scalar and the shared rank mask folded in, the plain number left to multiply by).

        The number rides in a product for nothing; without tensor scalars, up is the parameter itself.
        """
        number = float(self.scale)
        scalars = [] if self.gain is None else [self.gain]
        if self.rank_mask is not None and not self.per_sample:
            scalars.append(self.rank_mask)
        if isinstance(strength, (int, float)):
            number *= strength
        else:
            scalars.append(strength)
        up = self.up.to(acc(self.up, self.down)) if scalars else self.up
        for scalar in scalars:
            up = up * scalar.to(up.dtype)
        return up, number

    def factor(self, strength: Scalar) -> Tensor:
        """up with every scalar and the shared rank mask folded in, float32 or better."""
        up, number = self.parts(strength)
        return times(up.to(acc(self.up, self.down)), number)

    def down_matrix(self) -> Tensor:
        return self.down.flatten(1)

    # dense

    def can_merge(self, op: LayerOp) -> Verdict:
        return Verdict(False, "each sample has its own rank mask: no single weight") if self.per_sample else YES

    def dense(self, weight: Tensor | None, op: LayerOp, strength: Scalar) -> Tensor:
        up = self.factor(strength)
        if self.mid is not None:
            return self.mask_rows(lowrank.tucker_merge(up, self.mid, self.down_matrix()))
        return self.mask_rows(lowrank.lowrank_merge(None, ((up, self.down_matrix()),), 1.0)).view(op.weight_shape)

    def merged(self, kernels: Kernels, weight: Tensor, op: LayerOp, strength: Scalar) -> Tensor:
        return self._merge(kernels, weight, strength, None).view(op.weight_shape)

    def merged_to(self, kernels: Kernels, weight: Tensor, op: LayerOp, strength: Scalar, dtype: torch.dtype) -> Tensor:
        return self._merge(kernels, weight, strength, dtype).view(op.weight_shape).to(dtype)

    def _merge(self, kernels: Kernels, weight: Tensor, strength: Scalar, dtype: torch.dtype | None) -> Tensor:
        up, number = self.parts(strength)
        pair = _masked(up, self.row_mask), _folded(kernels, self.mid, self.down_matrix())
        return kernels.lowrank_merge(weight.flatten(1), (pair,), number, "product", dtype)

    def dense_cost(self, op: LayerOp) -> Cost:
        return product_cost(op.out, self.rank, op.fan_in, 4)

    def merge_uses(self, op: LayerOp) -> tuple[str, ...]:
        return ("lowrank_merge",) if self.mid is None else ("tucker_fold", "lowrank_merge")

    # bypass

    def branch(self, call: Call, strength: Scalar, base: Tensor | None = None) -> Tensor:
        if call.op.is_conv:
            return self._conv_branch(call, strength)
        h = self._mask(call.kernels.lowrank_down(call.x, self.down_matrix()), -1)
        return call.kernels.lowrank_up(h, self.factor(strength))

    def bypass(self, call: Call, strength: Scalar) -> Tensor:
        if self.row_mask is not None or call.op.groups > 1 or not call.drops_inside:
            return super().bypass(call, strength)
        if not call.op.is_conv:
            return self._linear(call, call.x, strength)
        if self.mid is None and _is_linear(call.op, call.x):
            return self._linear(call, call.x.movedim(1, -1), strength).movedim(-1, 1)
        if call.dropout:
            return super().bypass(call, strength)
        assert call.weight is not None
        return self._add_window(call.op.apply(call.x, call.weight), call, strength, call.bias)

    def _linear(self, call: Call, x: Tensor, strength: Scalar) -> Tensor:
        """The whole layer on x (..., in) as one primitive."""
        assert call.weight is not None
        up, number = self.parts(strength)
        mask = self.rank_mask if self.per_sample else None
        return call.kernels.lowrank_linear(
            x,
            call.weight.flatten(1),
            call.bias,
            self.down_matrix(),
            up,
            number,
            None,
            None,
            mask,
            *call.drop_arguments(),
        )

    def _add_window(self, y: Tensor, call: Call, strength: Scalar, bias: Tensor | None) -> Tensor:
        """y + branch + bias of a convolution: the rank-channel convolution, then one epilogue."""
        with plain_math(call.x):
            x = call.x.to(branch_dtype(compute_dtype(call.x)))
            h = self._mask(self._window(call.op, x), call.op.channel_dim)
        up, number = self.parts(strength)
        if y.dim() == len(call.op.kernel) + 1:
            return call.kernels.conv_epilogue(y.unsqueeze(0), h.unsqueeze(0), up, number, bias).squeeze(0)
        return call.kernels.conv_epilogue(y, h, up, number, bias)

    def add_to(self, y: Tensor, call: Call, strength: Scalar) -> Tensor:
        """y + branch, added in the operation that forms it."""
        if self.row_mask is not None or call.op.groups > 1:
            return y + self.masked_branch(call, strength).to(y.dtype)
        if call.op.is_conv:
            return self._add_window(y, call, strength, None)
        h = self._mask(call.kernels.lowrank_down(call.x, self.down_matrix()), -1)
        return add_product(y, h, *self.parts(strength))

    def scaled(self, axis: int, gain: Tensor, op: LayerOp) -> LowRank:
        """The same delta with its output rows (axis 0) or input columns (axis 1) times ``gain``."""
        if axis == 0:
            return replace(self, up=self.up * gain.to(acc(self.up))[:, None])
        spread = gain.to(acc(self.down)).repeat_interleave(op.window if self.mid is None else 1)
        return replace(self, down=self.down_matrix() * spread)

    def _conv_branch(self, call: Call, strength: Scalar) -> Tensor:
        op = call.op
        work = branch_dtype(compute_dtype(call.x))
        up = self.factor(strength).to(work)
        with plain_math(call.x):
            x = call.x.to(work)
            if op.groups > 1:
                return self._grouped(op, x, up)
            h = self._window(op, x)
            return op.pointwise(self._mask(h, op.channel_dim), up)

    def _window(self, op: LayerOp, x: Tensor) -> Tensor:
        """The rank-channel convolution; the input's channels are those one group sees."""
        if self.mid is None:
            kernel = self.down_matrix().view(self.rank, op.group_inp, *op.kernel)
            return op.convolve(op.prepad(x), kernel.to(x.dtype), None, 1)
        narrow = op.pointwise(x, self.down_matrix().to(x.dtype))
        return op.convolve(op.prepad(narrow), self.mid.to(x.dtype), None, 1)

    def _grouped(self, op: LayerOp, x: Tensor, up: Tensor) -> Tensor:
        """Groups become batch entries that share the down factor, then channels again for the grouped up."""
        single = x.dim() == len(op.kernel) + 1
        batched = x.unsqueeze(0) if single else x
        batch = batched.shape[0]
        folded = batched.reshape(batch * op.groups, op.group_inp, *batched.shape[2:])
        h = self._window(op, folded)
        h = h.reshape(batch, op.groups * self.rank, *h.shape[2:])
        if self.per_sample and self.rank_mask is not None:
            h = h * op.channels_of(self.rank_mask.repeat(1, op.groups)).to(h.dtype)
        out = op.pointwise(h, up, op.groups)
        return out.squeeze(0) if single else out

    def _mask(self, h: Tensor, dim: int) -> Tensor:
        """Per-sample rank masks on the rank axis ``dim`` of h; a shared mask is in the factor already."""
        if self.rank_mask is None or not self.per_sample:
            return h
        shape = [1] * h.dim()
        shape[0], shape[dim] = self.rank_mask.shape
        return h * self.rank_mask.to(h.dtype).view(shape)

    def bypass_cost(self, op: LayerOp, rows: int, size: int) -> Cost:
        first = op.inp if self.mid is not None else op.inp * op.window
        cost = product_cost(rows, first, self.rank, size) + product_cost(rows, self.rank, op.out, size)
        if self.mid is not None:
            cost = cost + product_cost(rows, self.rank * op.window, self.rank, size)
        saved = float(size) * rows * self.rank * (2 if self.mid is not None else 1)
        return replace(cost, saved=saved)

    def uses(self, op: LayerOp) -> tuple[str, ...]:
        return _path(op)


@dataclass
class Hadamard(Delta):
    """Factors of each side: up (out, r), down (r, fan_in), mid (r, r, *kernel) or None."""

    up1: Tensor
    down1: Tensor
    up2: Tensor
    down2: Tensor
    scale: float
    mid1: Tensor | None = None
    mid2: Tensor | None = None
    gain: Tensor | None = None
    row_mask: Tensor | None = None

    def scalar(self, strength: Scalar) -> Scalar:
        total: Scalar = self.scale * strength
        return total if self.gain is None else self.gain * total

    def dense(self, weight: Tensor | None, op: LayerOp, strength: Scalar) -> Tensor:
        if self.mid1 is not None and self.mid2 is not None:
            left = lowrank.tucker_merge(self.up1, self.mid1, self.down1)
            dense = left * lowrank.tucker_merge(self.up2, self.mid2, self.down2) * self.scalar(strength)
        else:
            pairs = ((self.up1, self.down1), (self.up2, self.down2))
            dense = lowrank.lowrank_merge(None, pairs, self.scalar(strength)).view(op.weight_shape)
        return self.mask_rows(dense)

    def merged(self, kernels: Kernels, weight: Tensor, op: LayerOp, strength: Scalar) -> Tensor:
        return self._merge(kernels, weight, strength, None).view(op.weight_shape)

    def merged_to(self, kernels: Kernels, weight: Tensor, op: LayerOp, strength: Scalar, dtype: torch.dtype) -> Tensor:
        return self._merge(kernels, weight, strength, dtype).view(op.weight_shape).to(dtype)

    def _merge(self, kernels: Kernels, weight: Tensor, strength: Scalar, dtype: torch.dtype | None) -> Tensor:
        first = _masked(self.up1, self.row_mask), _folded(kernels, self.mid1, self.down1)
        second = self.up2, _folded(kernels, self.mid2, self.down2)
        return kernels.lowrank_merge(weight.flatten(1), (first, second), self.scalar(strength), "product", dtype)

    def dense_cost(self, op: LayerOp) -> Cost:
        each = product_cost(op.out, self.up1.shape[1], op.fan_in, 4)
        elements = op.out * op.fan_in
        return each + each + Cost(bytes=12.0 * elements, launches=1, saved=8.0 * elements)

    def merge_uses(self, op: LayerOp) -> tuple[str, ...]:
        return ("lowrank_merge",) if self.mid1 is None else ("tucker_fold", "lowrank_merge")

    def narrow(self, kernels: Kernels | None = None, dtype: torch.dtype | None = None) -> LowRank | None:
        return None if self.mid1 is not None else self.khatri_rao(kernels, dtype)

    def khatri_rao(self, kernels: Kernels | None = None, dtype: torch.dtype | None = None) -> LowRank:
        """The same delta as a LowRank of rank r^2, down in ``dtype``; up, and down without it, in float32 or better."""
        product = lowrank.khatri_rao if kernels is None else kernels.khatri_rao
        up, down = product(self.up1, self.down1, self.up2, self.down2, dtype)
        mid = None
        if self.mid1 is not None and self.mid2 is not None:
            work = acc(self.up1, self.down1)
            rank = self.mid1.shape[0]
            grid = torch.einsum("pqk,stk->psqtk", self.mid1.to(work).flatten(2), self.mid2.to(work).flatten(2))
            mid = grid.reshape(rank * rank, rank * rank, *self.mid1.shape[2:])
        return LowRank(down, up, self.scale, mid, self.gain, None, self.row_mask)

    def branch(self, call: Call, strength: Scalar, base: Tensor | None = None) -> Tensor:
        return self._narrowed(call).branch(call, strength)

    def bypass(self, call: Call, strength: Scalar) -> Tensor:
        return self._narrowed(call).bypass(call, strength)

    def _narrowed(self, call: Call) -> LowRank:
        return self.khatri_rao(call.kernels, branch_dtype(compute_dtype(call.x)))

    def bypass_cost(self, op: LayerOp, rows: int, size: int) -> Cost:
        rank = self.up1.shape[1] ** 2
        first = op.inp if self.mid1 is not None else op.inp * op.window
        cost = product_cost(rows, first, rank, size) + product_cost(rows, rank, op.out, size)
        if self.mid1 is not None:
            cost = cost + product_cost(rows, rank * op.window, rank, size)
        return replace(cost, saved=float(size) * rows * rank)

    def uses(self, op: LayerOp) -> tuple[str, ...]:
        return ("khatri_rao", *_path(op))


def _path(op: LayerOp) -> tuple[str, ...]:
    """Primitives of a low-rank path beside a layer; a window of one may be a linear layer's, see :func:`_is_linear`."""
    if not op.is_conv:
        return ("lowrank_linear",)
    if op.groups > 1:
        return ()
    return ("conv_epilogue",) if op.window > 1 else ("lowrank_linear", "conv_epilogue")


def _is_linear(op: LayerOp, x: Tensor) -> bool:
    """Whether a convolution is a linear layer on channels that lie together in memory already."""
    plain = op.window == 1 and all(step == 1 for step in op.stride) and not op.pad
    flush = isinstance(op.padding, str) or not any(op.padding)
    return plain and flush and x.dim() == len(op.kernel) + 2 and x.movedim(1, -1).is_contiguous()


def _masked(up: Tensor, row_mask: Tensor | None) -> Tensor:
    """The row mask on an up factor, whose rows are the delta's."""
    return up if row_mask is None else up.to(acc(up)) * row_mask.to(acc(up))[:, None]


def _folded(kernels: Kernels, mid: Tensor | None, down: Tensor) -> Tensor:
    """The down factor as a matrix (r, fan_in), with the Tucker core in it."""
    return down if mid is None else kernels.tucker_fold(mid, down).flatten(1)
