"""Kronecker deltas (LoKr): dW = s w1 (x) w2, where either factor may itself be low-rank and w2 carries the window."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ..core.cost import Cost
from ..core.geometry import LayerOp
from ..core.precision import branch_dtype, compute_dtype
from ..core.verdict import Verdict
from ..primitives import Kernels, kron, lowrank
from ..primitives.gemm import plain_math
from .base import YES, Call, Delta, Scalar, acc, times


@dataclass
class Factor:
    """A matrix or kernel held whole or as up @ down, with a Tucker core in between where given.

    full (out, in, *window); or up (out, r), down (r, in) or (r, in * window), mid (r, r, *window).
    """

    full: Tensor | None = None
    up: Tensor | None = None
    down: Tensor | None = None
    mid: Tensor | None = None

    def shape(self, window: tuple[int, ...] = ()) -> tuple[int, int]:
        """(out, in) channels."""
        if self.full is not None:
            return self.full.shape[0], self.full.shape[1]
        assert self.up is not None
        assert self.down is not None
        size = 1
        for side in window if self.mid is None else ():
            size *= side
        return self.up.shape[0], self.down.shape[1] // size

    def build(self, window: tuple[int, ...] = ()) -> Tensor:
        """The factor itself, (out, in, *window)."""
        if self.full is not None:
            return self.full
        assert self.up is not None
        assert self.down is not None
        if self.mid is not None:
            return lowrank.tucker_merge(self.up, self.mid, self.down)
        flat = lowrank.lowrank_merge(None, ((self.up, self.down),), 1.0)
        return flat.view(self.up.shape[0], -1, *window)

    def chain(self) -> tuple[Tensor, ...]:
        """Matrices to apply in turn (no window)."""
        if self.full is not None:
            return (self.full.flatten(1),)
        assert self.up is not None
        assert self.down is not None
        return (self.down, self.up)

    def work(self, window: int = 1) -> int:
        """Multiply-adds per input row."""
        if self.full is not None:
            return self.full.shape[0] * self.full.shape[1] * window
        assert self.up is not None
        assert self.down is not None
        rank = self.up.shape[1]
        core = rank * rank * window if self.mid is not None else 0
        return self.up.numel() + self.down.numel() + core

    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.full, self.up, self.down, self.mid


@dataclass
class Kron(Delta):
    """w1 maps in_m -> out_l, w2 maps in_n -> out_k; scale: alpha / rank, or 1 where both factors are full."""

    w1: Factor
    w2: Factor
    scale: float
    gain: Tensor | None = None
    row_mask: Tensor | None = None

    def scalar(self, strength: Scalar) -> Scalar:
        total: Scalar = self.scale * strength
        return total if self.gain is None else self.gain * total

    def dense(self, weight: Tensor | None, op: LayerOp, strength: Scalar) -> Tensor:
        return self._product(kron.kron_merge, op, strength)

    def _product(self, merge: Callable[..., Tensor], op: LayerOp, strength: Scalar) -> Tensor:
        work = acc(*self.w1.tensors(), *self.w2.tensors())
        left = times(self.w1.build().to(work), self.scalar(strength))
        dense = merge(left, self.w2.build(op.kernel))
        return self.mask_rows(dense.reshape(op.weight_shape))

    def merged(self, kernels: Kernels, weight: Tensor, op: LayerOp, strength: Scalar) -> Tensor:
        dense = self._product(kernels.kron_merge, op, strength)
        return weight.to(dense.dtype) + dense

    def merge_uses(self, op: LayerOp) -> tuple[str, ...]:
        return ("kron_merge",)

    def dense_cost(self, op: LayerOp) -> Cost:
        return Cost(2.0 * op.out * op.fan_in, 4.0 * op.out * op.fan_in, 2)

    def can_bypass(self, op: LayerOp) -> Verdict:
        if op.groups > 1:
            return Verdict(False, "grouped convolution: rows of one group do not align with the Kronecker factors")
        return YES

    def branch(self, call: Call, strength: Scalar, base: Tensor | None = None) -> Tensor:
        first = self.w1_first(call.op)
        chain = self._scaled_chain(strength)
        if not call.op.is_conv:
            return call.kernels.kron_apply(call.x, chain, self.w2.chain(), first)
        work = branch_dtype(compute_dtype(call.x))
        with plain_math(call.x):
            return self._conv(call.op, call.x.to(work), tuple(item.to(work) for item in chain), first)

    def _scaled_chain(self, strength: Scalar) -> tuple[Tensor, ...]:
        *rest, last = self.w1.chain()
        return (*rest, times(last.to(acc(last)), self.scalar(strength)))

    def _conv(self, op: LayerOp, x: Tensor, chain: tuple[Tensor, ...], first: bool) -> Tensor:
        """in_m (or out_l) becomes a batch axis for the convolution with w2."""
        single = x.dim() == len(op.kernel) + 1
        batched = x.unsqueeze(0) if single else x
        grid = batched.unflatten(1, (chain[0].shape[1], -1))
        if first:
            grid = _mix(grid, chain)
        count = grid.shape[1]
        out = self._conv_w2(op, grid.flatten(0, 1))
        out = out.unflatten(0, (-1, count))
        if not first:
            out = _mix(out, chain)
        out = out.flatten(1, 2)
        return out.squeeze(0) if single else out

    def _conv_w2(self, op: LayerOp, x: Tensor) -> Tensor:
        w2 = self.w2
        if w2.full is not None:
            kernel = w2.full.reshape(*w2.full.shape[:2], *op.kernel)
            return op.convolve(op.prepad(x), kernel.to(x.dtype), None, 1)
        assert w2.up is not None
        assert w2.down is not None
        if w2.mid is not None:
            narrow = op.pointwise(x, w2.down.to(x.dtype))
            wide = op.convolve(op.prepad(narrow), w2.mid.to(x.dtype), None, 1)
        else:
            kernel = w2.down.view(w2.down.shape[0], -1, *op.kernel)
            wide = op.convolve(op.prepad(x), kernel.to(x.dtype), None, 1)
        return op.pointwise(wide, w2.up.to(x.dtype))

    def w1_first(self, op: LayerOp) -> bool:
        """Contraction order by multiply-adds."""
        return self._work(op, True) < self._work(op, False)

    def _work(self, op: LayerOp, w1_first: bool) -> int:
        out_l, in_m = self.w1.shape()
        out_k, in_n = self.w2.shape(op.kernel)
        inner, outer = self.w1.work(), self.w2.work(op.window)
        if w1_first:
            return in_n * inner + out_l * outer
        return in_m * outer + out_k * inner

    def bypass_cost(self, op: LayerOp, rows: int, size: int) -> Cost:
        flops = 2.0 * rows * min(self._work(op, True), self._work(op, False))
        out_l, in_m = self.w1.shape()
        out_k, in_n = self.w2.shape(op.kernel)
        middle = out_l * in_n if self.w1_first(op) else in_m * out_k
        traffic = float(size) * rows * (op.inp + 4 * middle + 3 * op.out)
        return Cost(flops, traffic, 4, saved=float(size) * rows * middle)

    def uses(self, op: LayerOp) -> tuple[str, ...]:
        return () if op.is_conv else ("kron_apply", "gemm_epilogue")


def _mix(grid: Tensor, chain: tuple[Tensor, ...]) -> Tensor:
    """Each matrix of ``chain`` in turn along axis 1 of (batch, m, channels, *spatial)."""
    shape = grid.shape
    flat = grid.flatten(2)
    for matrix in chain:
        flat = matrix.to(flat.dtype) @ flat
    return flat.view(shape[0], flat.shape[1], *shape[2:])
