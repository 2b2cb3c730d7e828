"""Norm: w' = w + m w_norm, b' = b + m b_norm for LayerNorm, GroupNorm and RMSNorm. Keys: w_norm, b_norm.

What the layer has is trained: a norm without bias gets no b_norm, one without any affine part cannot carry this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..bases.norms import NormBase, norm_kind
from ..core.errors import OptionError
from ..core.messages import say_once
from ..core.precision import accumulate_dtype
from ..core.problem import Plan
from ..deltas import Delta, Dense
from ..layers.adapter import Adapter
from ..layers.masks import keep_mask
from .registry import register_algorithm


@register_algorithm(detect_order=65)
class NormModule(Adapter):
    """Differences of a norm layer's weight and bias."""

    name = "norm"
    summary = "differences of a norm layer's weight and bias"
    support_module = {"layernorm", "groupnorm", "rmsnorm"}
    weight_list = ["w_norm", "b_norm"]
    weight_list_det = ["w_norm", "b_norm"]
    base: NormBase  # type: ignore[assignment]

    def __init__(
        self,
        lora_name: str,
        org_module: nn.Module,
        multiplier: float = 1.0,
        rank_dropout: float = 0.0,
        module_dropout: float = 0.0,
        rank_dropout_scale: bool = False,
        **kwargs: Any,
    ) -> None:
        if kwargs.pop("dropout", 0.0):
            raise OptionError(f"layer '{lora_name}': norm has no dropout; use rank_dropout or module_dropout")
        super().__init__(
            lora_name,
            org_module,
            multiplier,
            0.0,
            rank_dropout,
            module_dropout,
            rank_dropout_scale,
            **kwargs,
        )
        if self.not_supported:
            return
        self.w_norm = self._zeros_like(getattr(org_module, "weight", None))
        self.b_norm = self._zeros_like(getattr(org_module, "bias", None))

    @staticmethod
    def _zeros_like(stored: Any) -> nn.Parameter | None:
        return nn.Parameter(torch.zeros(stored.numel())) if isinstance(stored, Tensor) else None

    def _describe_base(self, module: nn.Module) -> None:
        kind = norm_kind(module)
        self.module, self.is_quant, self.kw_dict = type(module), False, {}
        self.not_supported = kind is None
        if kind is None:
            self.module_type = "unknown"
            say_once(f"layer '{self.lora_name}': {type(module).__name__} has no norm weight or bias to train; skipped")
            return
        self.base, self.module_type = NormBase(module, kind), kind.kind
        self.geometry = self.base.op
        self.dim = self.base.op.out
        self.shape = (self.dim,)

    # -- the difference

    def _differences(self, strength: Any, mask: Tensor | None = None) -> tuple[Tensor | None, Tensor | None]:
        """(m w_norm, m b_norm) with this call's mask, float32 or better."""
        pair = []
        for own in (self.w_norm, self.b_norm):
            value = None if own is None else own.to(accumulate_dtype(own)) * strength
            pair.append(value if value is None or mask is None else value * mask)
        return pair[0], pair[1]

    def build_delta(self, rank_mask: Tensor | None, row_mask: Tensor | None) -> Delta:
        weight = self.w_norm if self.w_norm is not None else torch.zeros_like(self.b_norm)  # type: ignore[arg-type]
        return Dense(weight, self.b_norm, row_mask)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.not_supported or self.merged_strength is not None or self._idle():
            return self.org_forward(x, *args, **kwargs)
        mask = None
        if self.rank_dropout and self.training:
            like = self.w_norm if self.w_norm is not None else self.b_norm
            mask = keep_mask(self.dim, self.rank_dropout, self.rank_dropout_scale, like)  # type: ignore[arg-type]
        weight, bias = self._differences(self._strength(x), mask)
        if self._owns_forward() and not args and not kwargs:
            return self._run_whole(x, weight, bias)
        return self._run_added(x, weight, bias, self.org_forward(x, *args, **kwargs))

    def _run_whole(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """One norm with the summed weight and bias."""
        whole = self.base.norm.affine
        assert whole is not None
        return whole(x, _sum(self.base.module.weight, weight), _sum(self.base.bias(), bias))

    def _run_added(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, out: Tensor) -> Tensor:
        """The norm below plus the change: normalized x times the weight's difference plus the bias's."""
        shape = [1] * x.dim()
        shape[self.base.norm.channel_axis] = -1
        added: Tensor | float = 0.0
        if weight is not None:
            stored = self.base.module.weight
            spread = weight.view(shape) if stored.dim() == 1 else weight.view(stored.shape)  # type: ignore[operator, arg-type]
            added = self.base.norm.normalize(x) * spread
        if bias is not None:
            own = self.base.bias()
            added = added + (bias.view(shape) if own is None or own.dim() == 1 else bias.view(own.shape))
        return out + (added.to(out.dtype) if isinstance(added, Tensor) else added)

    # -- weights

    def get_diff_weight(  # type: ignore[override]
        self, multiplier: float = 1.0, shape: Any = None, device: Any = None
    ) -> tuple[Tensor | None, Tensor | None]:
        weight, bias = self._differences(multiplier)
        if weight is not None and shape is not None:
            weight = weight.reshape(shape)
        return tuple(None if item is None else item.to(device=device) for item in (weight, bias))  # type: ignore[return-value]

    def get_merged_weight(  # type: ignore[override]
        self, multiplier: float = 1.0, shape: Any = None, device: Any = None
    ) -> tuple[Tensor | None, Tensor | None]:
        weight, bias = self._differences(multiplier)
        pair = []
        for stored, change in ((self.base.module.weight, weight), (self.base.bias(), bias)):
            whole = None if change is None else stored.to(change) + change.view_as(stored)  # type: ignore[union-attr, operator, arg-type]
            pair.append(None if whole is None else whole.to(device=device))
        if pair[0] is not None and shape is not None:
            pair[0] = pair[0].reshape(shape)
        return pair[0], pair[1]

    def check_finite(self, weight: Tensor | None, bias: Tensor | None = None) -> None:  # type: ignore[override]
        super().check_finite(weight, bias)  # type: ignore[arg-type]

    def _subtract(self, strength: float) -> None:
        weight, bias = self.get_diff_weight(strength)
        stored = self.base.module.weight, self.base.bias()
        left = [
            None if change is None else own.to(change) - change.view_as(own)  # type: ignore[union-attr, operator, arg-type]
            for own, change in zip(stored, (weight, bias), strict=True)
        ]
        self.base.write(left[0], left[1])

    def _delta_norm(self) -> float:
        parts = [item.square().sum() for item in self.get_diff_weight(1.0) if item is not None]
        return float(sum(parts) ** 0.5)

    def nominal_plan(self, rows: int = 0, owned: bool | None = None, dtype: torch.dtype | None = None) -> Plan:
        whole = self._owns_forward() if owned is None else owned
        reason = "one norm with the summed weight" if whole else "the layer runs its own forward; the change is added"
        return Plan("merged" if whole else "split", "torch", reason)

    # -- files

    def custom_state_dict(self) -> dict[str, Tensor]:
        named = {"w_norm": getattr(self, "w_norm", None), "b_norm": getattr(self, "b_norm", None)}
        return {key: value for key, value in named.items() if value is not None}

    @classmethod
    def from_tensors(cls, lora_name: str, org_module: nn.Module, tensors: dict[str, Tensor]) -> NormModule:
        return cls(lora_name, org_module)

    def shrink_parameters(self) -> Sequence[tuple[Tensor, Tensor | float]]:
        return [(item.data, 0.0) for item in (self.w_norm, self.b_norm) if item is not None]


def _sum(stored: Any, change: Tensor | None) -> Tensor | None:
    """stored + change, rounded once to the stored dtype."""
    if change is None or stored is None:
        return stored
    return (stored.to(change.dtype) + change.view_as(stored)).to(stored.dtype)
