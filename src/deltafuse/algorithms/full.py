"""Full: W' = W + m diff, b' = b + m diff_b. As large as the layer. Keys: diff, diff_b. Starts at zero."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import OptionError, TargetError
from ..deltas import Delta, Dense
from ..layers.adapter import Adapter
from .common import decompose_options
from .registry import register_algorithm


@register_algorithm(detect_order=50)
class FullModule(Adapter):
    """A dense difference for weight and bias. The base weight stays where it is; only the difference is trained."""

    name = "full"
    summary = "a dense difference of weight and bias"
    weight_list = ["diff", "diff_b", "dora_scale"]
    weight_list_det = ["diff"]
    options = frozenset({"weight_decompose", "wd_on_out", "detach_norm"})

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
        rank_dropout_scale: bool = False,
        bypass_mode: bool | None = None,
        weight_decompose: bool = False,
        wd_on_out: bool = True,
        detach_norm: bool = False,
        new_bias: bool = False,
        **kwargs: Any,
    ) -> None:
        extra = {"use_tucker": use_tucker, "use_scalar": use_scalar, **kwargs}
        if bypass_mode:
            raise OptionError(
                f"layer '{lora_name}': bypass_mode is not supported by full: its difference is as large as the layer"
            )
        super().__init__(
            lora_name,
            org_module,
            multiplier,
            dropout,
            rank_dropout,
            module_dropout,
            rank_dropout_scale,
            bypass_mode,
            **extra,
        )
        if not self.base.mergeable():
            raise TargetError(f"layer '{lora_name}': full cannot sit on it: {self.base.mergeable().reason}")
        self.weight = nn.Parameter(torch.zeros(self.shape))
        has_bias = new_bias or self.base.bias() is not None
        self.bias = nn.Parameter(torch.zeros(self.dim)) if has_bias else None
        self.decompose(weight_decompose, wd_on_out, detach_norm)

    def build_delta(self, rank_mask: Tensor | None, row_mask: Tensor | None) -> Delta:
        return Dense(self.weight, self.bias, row_mask)

    def custom_state_dict(self) -> dict[str, Tensor]:
        state = self.magnitude_state()
        state["diff"] = self.weight
        if self.bias is not None:
            state["diff_b"] = self.bias
        return state

    def adopt(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors = super().adopt(tensors)
        renames = {"diff": "weight", "diff_b": "bias"}
        return {renames.get(key, key): value for key, value in tensors.items()}

    @classmethod
    def from_tensors(cls, lora_name: str, org_module: nn.Module, tensors: dict[str, Tensor]) -> FullModule:
        return cls(
            lora_name,
            org_module,
            new_bias="diff_b" in tensors,
            **decompose_options(tensors),
        )

    def shrink_parameters(self) -> Sequence[tuple[Tensor, Tensor | float]]:
        bias = [] if self.bias is None else [(self.bias.data, 0.0)]
        return [(self.weight.data, 0.0), *bias, *self._shrink_magnitude()]
