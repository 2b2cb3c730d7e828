"""Rotations: OFT on the output or the input side, and BOFT.

Rotation (output): W'_blk = R^T W_blk, so y = R^T (W x) before the bias. Rotation (input): y = W (x R) + b.
Butterfly: W' = R_m .. R_1 W with R_i block rotations between strided pairs.
Strength m acts as R -> m R + (1 - m) I, per stage for BOFT; a rescale vector v acts as 1 + m (v - 1).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.cost import Cost
from ..core.geometry import LayerOp
from ..core.verdict import Verdict
from ..primitives import rotation
from .base import YES, Call, Delta, Scalar, acc, times

Turn = Callable[..., Tensor]


class _OutputSide(Delta):
    """What OFT and BOFT on the output side share: only the turn itself differs."""

    multiplicative = True
    needs_weight = True
    rescale: Tensor | None

    @abstractmethod
    def turn(self, rotate: Turn, fly: Turn, y: Tensor, dim: int, strength: Scalar) -> Tensor:
        """(R_m - I) along axis ``dim`` of y, by the block_rotate or butterfly function handed in."""

    @abstractmethod
    def parameters(self) -> tuple[Tensor, ...]:
        """Tensors that decide the working precision."""

    def can_bypass(self, op: LayerOp) -> Verdict:
        if (op.out // op.groups) % self.reach():
            return Verdict(False, "grouped convolution: a rotation mixes outputs of several groups")
        return YES

    @abstractmethod
    def reach(self) -> int:
        """Size of the aligned runs of channels that are mixed among themselves."""

    def _change(self, y: Tensor, turned: Tensor, scale: Tensor | None, strength: Scalar) -> Tensor:
        """turned + m (v - 1)(y + turned): the change of y by rotation and rescale, rounded once."""
        if scale is None:
            return turned
        share = (scale - 1) * strength
        return (turned * (1 + share) + y * share).to(y.dtype)

    def dense(self, weight: Tensor | None, op: LayerOp, strength: Scalar) -> Tensor:
        assert weight is not None
        wide = weight.to(acc(weight, self.rescale, *self.parameters()))
        turned = self.turn(rotation.block_rotate, rotation.butterfly, wide, 0, strength)
        scale = None if self.rescale is None else self.rescale.to(wide.dtype).view(-1, *(1,) * (wide.dim() - 1))
        return self.mask_rows(self._change(wide, turned, scale, strength))

    def branch(self, call: Call, strength: Scalar, base: Tensor | None = None) -> Tensor:
        y = call.base() if base is None else base
        turned = self.turn(call.kernels.block_rotate, call.kernels.butterfly, y, call.op.channel_dim, strength)
        scale = None if self.rescale is None else call.op.channels(self.rescale.to(acc(self.rescale)))
        return self._change(y, turned, scale, strength)


@dataclass
class Rotation(_OutputSide):
    """blocks (num, s, s) free matrices whose skew part is used; bound: limit on |Q| or 0; rescale (out,) or None."""

    blocks: Tensor
    bound: float = 0.0
    rescale: Tensor | None = None
    row_mask: Tensor | None = None

    def parameters(self) -> tuple[Tensor, ...]:
        return (self.blocks,)

    def reach(self) -> int:
        return self.blocks.shape[-1]

    def turn(self, rotate: Turn, fly: Turn, y: Tensor, dim: int, strength: Scalar) -> Tensor:
        delta = rotation.cayley_delta(self.blocks, self.bound)
        return rotate(y, times(delta, strength), dim, True)

    def bypass_cost(self, op: LayerOp, rows: int, size: int) -> Cost:
        block = self.blocks.shape[-1]
        return Cost(2.0 * rows * op.out * block, 3.0 * size * rows * op.out, 6, saved=float(size) * rows * op.out)

    def dense_cost(self, op: LayerOp) -> Cost:
        return Cost(2.0 * op.out * op.fan_in * self.blocks.shape[-1], 12.0 * op.out * op.fan_in, 6)

    def uses(self, op: LayerOp) -> tuple[str, ...]:
        return ("cayley_delta", "block_rotate")


@dataclass
class Butterfly(_OutputSide):
    """blocks (m, num, b, b), b even and num a power of two; bound and rescale as in :class:`Rotation`."""

    blocks: Tensor
    bound: float = 0.0
    rescale: Tensor | None = None
    row_mask: Tensor | None = None

    def parameters(self) -> tuple[Tensor, ...]:
        return (self.blocks,)

    def reach(self) -> int:
        return self.blocks.shape[-1] << (self.blocks.shape[0] - 1)

    def turn(self, rotate: Turn, fly: Turn, y: Tensor, dim: int, strength: Scalar) -> Tensor:
        return fly(y, rotation.cayley_delta(self.blocks, self.bound), strength, dim)

    def bypass_cost(self, op: LayerOp, rows: int, size: int) -> Cost:
        stages, _, block, _ = self.blocks.shape
        traffic = 6.0 * size * rows * op.out * stages
        return Cost(
            2.0 * rows * op.out * block * stages, traffic, 6 * stages, saved=float(size) * rows * op.out * stages
        )

    def dense_cost(self, op: LayerOp) -> Cost:
        stages, _, block, _ = self.blocks.shape
        elements = op.out * op.fan_in
        traffic, saved = 24.0 * elements * stages, 6.0 * elements * stages
        return Cost(2.0 * elements * block * stages, traffic, 6 * stages, saved)

    def uses(self, op: LayerOp) -> tuple[str, ...]:
        return ("cayley_delta", "butterfly")


@dataclass
class InputRotation(Delta):
    """y = W (x R) + b with blocks (num, s, s) over the input channels; a block never crosses a convolution group."""

    blocks: Tensor
    bound: float = 0.0
    row_mask: Tensor | None = None

    needs_weight = True

    def dense(self, weight: Tensor | None, op: LayerOp, strength: Scalar) -> Tensor:
        assert weight is not None
        wide = weight.to(acc(weight, self.blocks))
        delta = times(rotation.cayley_delta(self.blocks, self.bound).to(wide.dtype), strength)
        if op.groups == 1:
            return self.mask_rows(rotation.block_rotate(wide, delta, 1, False))
        rows = wide.unflatten(0, (op.groups, -1))
        per_group = delta.unflatten(0, (op.groups, -1))
        turned = [rotation.block_rotate(part, turn, 1, False) for part, turn in zip(rows, per_group, strict=True)]
        return self.mask_rows(torch.cat(turned))

    def _turned(self, call: Call, strength: Scalar) -> Tensor:
        delta = times(rotation.cayley_delta(self.blocks, self.bound), strength)
        return call.kernels.block_rotate(call.x, delta, call.op.channel_dim, True)

    def branch(self, call: Call, strength: Scalar, base: Tensor | None = None) -> Tensor:
        return call.base(self._turned(call, strength))

    def bypass(self, call: Call, strength: Scalar) -> Tensor:
        if call.dropout or self.row_mask is not None:
            return super().bypass(call, strength)
        return call.with_bias(call.base(call.x + self._turned(call, strength)))

    def bypass_cost(self, op: LayerOp, rows: int, size: int) -> Cost:
        block = self.blocks.shape[-1]
        return Cost(2.0 * rows * op.inp * block, 4.0 * size * rows * op.inp, 7, saved=float(size) * rows * op.inp)

    def dense_cost(self, op: LayerOp) -> Cost:
        return Cost(2.0 * op.out * op.fan_in * self.blocks.shape[-1], 12.0 * op.out * op.fan_in, 6)

    def uses(self, op: LayerOp) -> tuple[str, ...]:
        return ("cayley_delta", "block_rotate", "gemm_epilogue")
