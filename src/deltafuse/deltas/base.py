"""What every delta can do.

A delta is a change W -> W' of one layer's weight, held as the tensors of one forward call. It knows its dense form
(the reference every other path is tested against), its exact bypass form where it has one, and what each costs. It
never names a backend: all products run through the :class:`~deltafuse.primitives.Kernels` table it is handed.

Strength m (a float or a 0-d tensor) interpolates between the base (m = 0) and the adapted layer (m = 1).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.cost import Cost
from ..core.geometry import LayerOp
from ..core.precision import accumulate_dtype
from ..core.verdict import Verdict
from ..primitives import Kernels
from ..primitives.dropout import draw_seed

Scalar = Any
"""A Python float or a 0-d tensor."""

YES = Verdict(True, "exact")


def times(factor: Tensor, scalar: Scalar) -> Tensor:
    """factor * scalar, skipping a plain 1."""
    return factor if isinstance(scalar, (int, float)) and scalar == 1 else factor * scalar


@dataclass
class Call:
    """One forward call as a delta sees it.

    op: the layer's geometry. weight (out, in // groups, *kernel), bias (out,) or None: the base as it is right now,
    or None where a foreign base only offers its own forward. dropout: probability on the delta's output.
    """

    kernels: Kernels
    op: LayerOp
    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    dropout: float = 0.0

    def base(self, x: Tensor | None = None) -> Tensor:
        """W x without bias."""
        assert self.weight is not None
        x = self.x if x is None else x
        if self.op.is_conv:
            return self.op.apply(x, self.weight)
        return self.kernels.gemm_epilogue(x, self.weight, None, None, None)

    def with_bias(self, y: Tensor) -> Tensor:
        """y + bias."""
        return y if self.bias is None else y + self.op.channels(self.bias).to(y.dtype)

    def drop(self, branch: Tensor) -> Tensor:
        """Dropout on a delta's output."""
        return torch.nn.functional.dropout(branch, self.dropout, True) if self.dropout else branch

    @property
    def drops_inside(self) -> bool:
        """Whether a linear layer's primitive makes the dropout mask itself, or there is none to make.

        The reference could, but PyTorch's own dropout takes one pass where its integer arithmetic takes a dozen.
        """
        return not self.dropout or self.kernels.fused("lowrank_linear")

    def drop_arguments(self) -> tuple[Any, ...]:
        """What lowrank_linear takes for this call's dropout; draws a seed where there is any."""
        return (self.dropout, draw_seed(self.x.device)) if self.dropout else ()


class Delta(ABC):
    """Base of the algebra. Subclasses are dataclasses of tensors."""

    row_mask: Tensor | None = None
    """(out,): multiplies the rows of the delta (rank dropout of algorithms without a rank axis)."""

    multiplicative = False
    """True where the branch is computed from W x, so the caller may hand that product in."""

    needs_weight = False
    """True where the branch reads the base weight itself, not only its output."""

    # -- dense form ---------------------------------------------------------------------------------------------

    @abstractmethod
    def dense(self, weight: Tensor | None, op: LayerOp, strength: Scalar) -> Tensor:
        """W' - W, shape ``op.weight_shape``, float32 or better, never formed by subtracting two weights."""

    def narrow(self, kernels: Kernels | None = None, dtype: torch.dtype | None = None) -> Any:
        """The same delta as a LowRank of a linear layer, or None where it has no such form; factors that have to be
        formed are formed by ``kernels`` in ``dtype``."""
        return None

    def dense_bias(self, strength: Scalar) -> Tensor | None:
        """b' - b, or None where the bias is left alone."""
        return None

    def merged(self, kernels: Kernels, weight: Tensor, op: LayerOp, strength: Scalar) -> Tensor:
        """W' in float32 or better; the caller rounds once."""
        delta = self.dense(weight, op, strength)
        return weight.to(delta.dtype) + delta

    def merged_to(self, kernels: Kernels, weight: Tensor, op: LayerOp, strength: Scalar, dtype: torch.dtype) -> Tensor:
        """W' rounded once to ``dtype``; overridden where that takes no pass of its own."""
        return self.merged(kernels, weight, op, strength).to(dtype)

    # -- bypass form --------------------------------------------------------------------------------------------

    def can_bypass(self, op: LayerOp) -> Verdict:
        """Whether the exact form without a dense delta exists for this layer."""
        return YES

    def can_merge(self, op: LayerOp) -> Verdict:
        """Whether one dense weight can stand for the delta."""
        return YES

    @abstractmethod
    def branch(self, call: Call, strength: Scalar, base: Tensor | None = None) -> Tensor:
        """(W' - W) x without bias. ``base`` is W x where the caller has it and the delta is multiplicative."""

    def bypass(self, call: Call, strength: Scalar) -> Tensor:
        """W' x + b without a dense delta."""
        if self.multiplicative:
            base = call.base()
            return call.with_bias(base + self.contribution(call, strength, base).to(base.dtype))
        assert call.weight is not None
        y = call.op.apply(call.x, call.weight, call.bias)
        return y + self.contribution(call, strength).to(y.dtype)

    def contribution(self, call: Call, strength: Scalar, base: Tensor | None = None) -> Tensor:
        """What is added to W x: the branch with its row mask and dropout."""
        return call.drop(self.masked_branch(call, strength, base))

    def masked_branch(self, call: Call, strength: Scalar, base: Tensor | None = None) -> Tensor:
        """:meth:`branch` with the row mask applied to the output channels."""
        out = self.branch(call, strength, base)
        return out if self.row_mask is None else out * call.op.channels(self.row_mask).to(out.dtype)

    def mask_rows(self, dense: Tensor) -> Tensor:
        """The row mask on a dense delta."""
        if self.row_mask is None:
            return dense
        return dense * self.row_mask.to(dense.dtype).view(-1, *(1,) * (dense.dim() - 1))

    # -- planning -----------------------------------------------------------------------------------------------

    @abstractmethod
    def bypass_cost(self, op: LayerOp, rows: int, size: int) -> Cost:
        """Work of the bypass form beyond the base product; ``size`` is bytes per element."""

    def fused_cost(self, op: LayerOp, rows: int, size: int) -> Cost:
        """:meth:`bypass_cost` where a fused backend runs it."""
        return self.bypass_cost(op, rows, size)

    @abstractmethod
    def dense_cost(self, op: LayerOp) -> Cost:
        """Work of forming the dense delta."""

    def uses(self, op: LayerOp) -> tuple[str, ...]:
        """Names of the primitives the bypass form runs."""
        return ()

    def merge_uses(self, op: LayerOp) -> tuple[str, ...]:
        """Names of the primitives the merged form runs."""
        return ()


def product_cost(rows: int, inner: int, cols: int, size: int) -> Cost:
    """One matrix product (rows, inner) x (inner, cols) that writes its output."""
    return Cost(2.0 * rows * inner * cols, float(size) * (rows * inner + inner * cols + rows * cols), 1)


def acc(*tensors: Tensor | None) -> torch.dtype:
    """Shorthand for the accumulation dtype of ``tensors``."""
    return accumulate_dtype(*tensors)
