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

    def scalars(self, strength: Scalar) -> tuple[Tensor | None, float]:
        """(the product of tensor scalars or None, the plain number left to multiply by)."""
        number = float(self.scale)
        if isinstance(strength, (int, float)):
            return self.gain, number * strength
        return strength if self.gain is None else self.gain * strength, number

    def left_chain(self, strength: Scalar) -> tuple[tuple[Tensor, ...], float]:
        """(w1's chain with every tensor scalar folded in, the number): without scalars the parameters themselves."""
        tensor, number = self.scalars(strength)
        return self.w1.chain() if tensor is None else kron.scaled(self.w1.chain(), tensor), number

    def dense(self, weight: Tensor | None, op: LayerOp, strength: Scalar) -> Tensor:
        return self.mask_rows(self._merge(kron.kron_merge, None, op, strength))

    def _merge(self, merge: Callable[..., Tensor], weight: Tensor | None, op: LayerOp, strength: Scalar) -> Tensor:
        tensor, number = self.scalars(strength)
        left = self.w1.build() if tensor is None else times(self.w1.build().to(acc(*self.w1.tensors())), tensor)
        merged = merge(weight, left, self.w2.build(op.kernel), number)
        return merged.reshape(op.weight_shape)

    def merged(self, kernels: Kernels, weight: Tensor, op: LayerOp, strength: Scalar) -> Tensor:
        if self.row_mask is not None:
            return super().merged(kernels, weight, op, strength)
        return self._merge(kernels.kron_merge, weight, op, strength)

    def merge_uses(self, op: LayerOp) -> tuple[str, ...]:
        return () if self.row_mask is not None else ("kron_merge",)

    def dense_cost(self, op: LayerOp) -> Cost:
        return Cost(2.0 * op.out * op.fan_in, 4.0 * op.out * op.fan_in, 2)

    def can_bypass(self, op: LayerOp) -> Verdict:
        if op.groups > 1:
            return Verdict(False, "grouped convolution: rows of one group do not align with the Kronecker factors")
        return YES

    def branch(self, call: Call, strength: Scalar, base: Tensor | None = None) -> Tensor:
        first = self.w1_first(call.op)
        chain, number = self.left_chain(strength)
        if not call.op.is_conv:
            return call.kernels.kron_apply(call.x, chain, self.w2.chain(), first, number)
        work = branch_dtype(compute_dtype(call.x))
        chain = kron.scaled(chain, number)
        with plain_math(call.x):
            return self._conv(call.op, call.x.to(work), tuple(item.to(work) for item in chain), first)

    def bypass(self, call: Call, strength: Scalar) -> Tensor:
        if call.op.is_conv or call.dropout or self.row_mask is not None:
            return super().bypass(call, strength)
        chain, number = self.left_chain(strength)
        return call.kernels.kron_linear(call.x, call.weight, call.bias, chain, self.w2.chain(), number)

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

    def fused_cost(self, op: LayerOp, rows: int, size: int) -> Cost:
        """x read, what is added to the base product written and read once more."""
        flops = 2.0 * rows * min(self._work(op, True), self._work(op, False))
        if op.is_conv:
            return self.bypass_cost(op, rows, size)
        return Cost(flops, float(size) * rows * (op.inp + 2 * op.out), 1)

    def uses(self, op: LayerOp) -> tuple[str, ...]:
        if op.is_conv:
            return ()
        return ("kron_linear", "kron_apply") if self.row_mask is None else ("kron_apply",)


def _mix(grid: Tensor, chain: tuple[Tensor, ...]) -> Tensor:
    """Each matrix of ``chain`` in turn along axis 1 of (batch, m, channels, *spatial)."""
    shape = grid.shape
    flat = grid.flatten(2)
    for matrix in chain:
        flat = matrix.to(flat.dtype) @ flat
    return flat.view(shape[0], flat.shape[1], *shape[2:])
