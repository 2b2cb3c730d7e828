"""LoKr: dW = scale w1 (x) w2 with w1 (out_l, in_m) and w2 (out_k, in_n, *k), either of them low-rank.

Source: Yeh et al. 2023 (LyCORIS). Keys: lokr_w1 or lokr_w1_a (out_l, r), lokr_w1_b (r, in_m); lokr_w2 or lokr_w2_a
(out_k, r), lokr_w2_b (r, in_n k), with Tucker lokr_w2_a (r, out_k), lokr_w2_b (r, in_n), lokr_t2 (r, r, *k); alpha,
dora_scale. scale is alpha / rank, and 1 where both factors are full. Starts at zero: w2 or w2_b is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..bases import base_for
from ..core.errors import CheckpointError
from ..core.factorize import factorization
from ..core.geometry import LayerOp
from ..deltas import Delta, Factor, Kron
from ..layers.state import folded
from .common import Ranked, decompose_options, kaiming
from .registry import register_algorithm


@dataclass(frozen=True)
class Layout:
    """How a weight splits: w1 (out_l, in_m), w2 (out_k, in_n), and which of them is held whole."""

    out_l: int
    out_k: int
    in_m: int
    in_n: int
    w1_full: bool
    w2_full: bool

    @classmethod
    def choose(cls, op: LayerOp, rank: int, factor: int, both: bool, full: bool, unbalanced: bool) -> Layout:
        """The split by ``factor``; a factor is low-rank where that is smaller and asked for."""
        in_m, in_n = factorization(op.group_inp, factor)
        out_l, out_k = factorization(op.out, factor)
        if unbalanced:
            out_l, out_k = out_k, out_l
        w1_full = full or not both or rank >= max(out_l, in_m) / 2
        w2_full = full or rank >= max(out_k, in_n) / 2
        return cls(out_l, out_k, in_m, in_n, w1_full, w2_full)

    @classmethod
    def of_file(cls, layer: str, op: LayerOp, tensors: dict[str, Tensor]) -> Layout:
        """The split a file's tensors have, checked against the layer."""
        out_l, in_m = _outer(tensors, "lokr_w1", False)
        out_k, in_n = _outer(tensors, "lokr_w2", "lokr_t2" in tensors)
        w2_full = "lokr_w2" in tensors
        if not w2_full and "lokr_t2" not in tensors:
            in_n //= op.window
        if (out_l * out_k, in_m * in_n) != (op.out, op.group_inp):
            raise CheckpointError(
                f"layer '{layer}': its lokr tensors make a {out_l * out_k} x {in_m * in_n} matrix, "
                f"but the layer is {op.describe()}"
            )
        return cls(out_l, out_k, in_m, in_n, "lokr_w1" in tensors, w2_full)


def _outer(tensors: dict[str, Tensor], key: str, tucker: bool) -> tuple[int, int]:
    if key in tensors:
        return tensors[key].shape[0], tensors[key].shape[1]
    a, b = tensors[f"{key}_a"], tensors[f"{key}_b"]
    return (a.shape[1] if tucker else a.shape[0]), b.shape[1]


@register_algorithm(detect_order=40)
class LokrModule(Ranked):
    """Kronecker product of a small and a larger matrix."""

    name = "lokr"
    summary = "Kronecker product of two matrices, either low-rank"
    weight_list = [
        "lokr_w1",
        "lokr_w1_a",
        "lokr_w1_b",
        "lokr_w2",
        "lokr_w2_a",
        "lokr_w2_b",
        "lokr_t1",
        "lokr_t2",
        "alpha",
        "dora_scale",
    ]
    weight_list_det = ["lokr_w1", "lokr_w1_a"]
    lokr_w1: nn.Parameter
    lokr_w1_a: nn.Parameter
    lokr_w1_b: nn.Parameter
    lokr_w2: nn.Parameter
    lokr_w2_a: nn.Parameter
    lokr_w2_b: nn.Parameter
    lokr_t2: nn.Parameter
    options = frozenset(
        {
            "use_tucker",
            "use_scalar",
            "decompose_both",
            "factor",
            "weight_decompose",
            "wd_on_out",
            "detach_norm",
            "full_matrix",
            "rs_lora",
            "unbalanced_factorization",
        }
    )

    def __init__(
        self,
        lora_name: str,
        org_module: nn.Module,
        multiplier: float = 1.0,
        lora_dim: int = 4,
        alpha: Any = 1,
        dropout: float = 0.0,
        rank_dropout: float = 0.0,
        module_dropout: float = 0.0,
        use_tucker: bool = False,
        use_scalar: bool = False,
        decompose_both: bool = False,
        factor: int = -1,
        rank_dropout_scale: bool = False,
        weight_decompose: bool = False,
        wd_on_out: bool = True,
        full_matrix: bool = False,
        bypass_mode: bool | None = None,
        rs_lora: bool = False,
        unbalanced_factorization: bool = False,
        detach_norm: bool = False,
        layout: Layout | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            lora_name,
            org_module,
            multiplier,
            dropout,
            rank_dropout,
            module_dropout,
            rank_dropout_scale,
            bypass_mode,
            **kwargs,
        )
        self.full_matrix = bool(full_matrix)
        rank = int(lora_dim)
        self.layout = layout or Layout.choose(
            self.geometry, rank, int(factor), bool(decompose_both), self.full_matrix, bool(unbalanced_factorization)
        )
        self.use_w1, self.use_w2 = self.layout.w1_full, self.layout.w2_full
        self.tucker = bool(use_tucker) and self.geometry.window > 1 and not self.use_w2
        self.set_scale(lora_dim, alpha, rs_lora, ignore_alpha=self.use_w1 and self.use_w2)
        self._build(self.lora_dim)
        self.decompose(weight_decompose, wd_on_out, detach_norm)
        self.set_scalar(use_scalar)
        self._init()

    def _build(self, rank: int) -> None:
        split, op = self.layout, self.geometry
        if self.use_w1:
            self._add("lokr_w1", split.out_l, split.in_m)
        else:
            self._add("lokr_w1_a", split.out_l, rank)
            self._add("lokr_w1_b", rank, split.in_m)
        if self.use_w2:
            self._add("lokr_w2", split.out_k, split.in_n, *op.kernel)
        elif self.tucker:
            self._add("lokr_t2", rank, rank, *op.kernel)
            self._add("lokr_w2_a", rank, split.out_k)
            self._add("lokr_w2_b", rank, split.in_n)
        else:
            self._add("lokr_w2_a", split.out_k, rank)
            self._add("lokr_w2_b", rank, split.in_n * op.window)

    def _add(self, name: str, *shape: int) -> None:
        self.register_parameter(name, nn.Parameter(torch.empty(shape)))

    def _init(self) -> None:
        last = self.lokr_w2 if self.use_w2 else self.lokr_w2_b
        if not self.use_w2:
            if self.tucker:
                kaiming(self.lokr_t2)
            kaiming(self.lokr_w2_a)
        if self.use_scalar:
            kaiming(last)
        else:
            nn.init.zeros_(last)
        for name in ("lokr_w1",) if self.use_w1 else ("lokr_w1_a", "lokr_w1_b"):
            kaiming(getattr(self, name))

    def _factors(self) -> tuple[Factor, Factor]:
        w1 = Factor(full=self.lokr_w1) if self.use_w1 else Factor(up=self.lokr_w1_a, down=self.lokr_w1_b)
        if self.use_w2:
            return w1, Factor(full=self.lokr_w2)
        if self.tucker:
            return w1, Factor(up=self.lokr_w2_a.t(), down=self.lokr_w2_b, mid=self.lokr_t2)
        return w1, Factor(up=self.lokr_w2_a, down=self.lokr_w2_b)

    def build_delta(self, rank_mask: Tensor | None, row_mask: Tensor | None) -> Delta:
        return Kron(*self._factors(), self.scale, self.learned_scalar, row_mask)

    def _names(self) -> list[str]:
        return [key for key in self.weight_list if key.startswith("lokr_") and hasattr(self, key)]

    def custom_state_dict(self) -> dict[str, Tensor]:
        state = {**self.magnitude_state(), "alpha": self.alpha_tensor()}
        state.update({key: getattr(self, key) for key in self._names()})
        first = "lokr_w1" if self.use_w1 else "lokr_w1_a"
        state[first] = folded(state[first], self.learned_scalar)
        return state

    @classmethod
    def from_tensors(cls, lora_name: str, org_module: nn.Module, tensors: dict[str, Tensor]) -> LokrModule:
        base = base_for(org_module)
        layout = None if base is None else Layout.of_file(lora_name, base.op, tensors)
        return cls(
            lora_name,
            org_module,
            lora_dim=_rank_of(tensors),
            alpha=tensors.get("alpha"),
            use_tucker="lokr_t2" in tensors,
            layout=layout,
            **decompose_options(tensors),
        )

    def shrink_parameters(self) -> Sequence[tuple[Tensor, Tensor | float]]:
        return [*((getattr(self, key).data, 0.0) for key in self._names()), *self._shrink_magnitude()]


def _rank_of(tensors: dict[str, Tensor]) -> int:
    """The rank a file's low-rank factor has; without one it plays no part."""
    for key in ("lokr_w2_b", "lokr_w1_b"):
        if key in tensors:
            return tensors[key].shape[0]
    return 1
