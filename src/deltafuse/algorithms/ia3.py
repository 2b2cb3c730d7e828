"""IA3: a learned factor per output channel, or per input channel, W' = (1 + m v) W.

Source: Liu et al. 2022. Keys: weight (C,) for linear layers, (1, C, 1...) for convolutions; on_input (0 or 1).
Starts at zero. There is no rank and no alpha.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..core.messages import say_once
from ..deltas import ChannelScale, Delta
from ..layers.adapter import Adapter
from .common import decompose_options
from .registry import register_algorithm


@register_algorithm(detect_order=30)
class IA3Module(Adapter):
    """Channel scales on the output (before the bias) or on the input."""

    name = "ia3"
    summary = "a learned factor per output or input channel"
    weight_list = ["weight", "on_input", "dora_scale"]
    weight_list_det = ["on_input"]
    options = frozenset({"train_on_input", "weight_decompose", "wd_on_out", "detach_norm"})

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
        weight_decompose: bool = False,
        bypass_mode: bool | None = None,
        rs_lora: bool = False,
        train_on_input: bool = False,
        wd_on_out: bool = True,
        detach_norm: bool = False,
        **kwargs: Any,
    ) -> None:
        extra = {"use_tucker": use_tucker, "use_scalar": use_scalar, "rs_lora": rs_lora, **kwargs}
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
        self.train_input = bool(train_on_input)
        self.isconv = self.geometry.is_conv
        count = self.geometry.inp if self.train_input else self.geometry.out
        shape = (1, count, *(1,) * len(self.geometry.kernel)) if self.isconv else (count,)
        self.weight = nn.Parameter(torch.zeros(shape))
        self.register_buffer("on_input", torch.tensor(int(self.train_input)))
        self.decompose(weight_decompose, wd_on_out, detach_norm)
        if self.wd and self.wd_on_out != self.train_input:
            say_once(f"layer '{lora_name}': ia3 scales what this decomposition normalizes: only the magnitude acts")

    def build_delta(self, rank_mask: Tensor | None, row_mask: Tensor | None) -> Delta:
        return ChannelScale(self.weight.flatten(), self.train_input, row_mask)

    def custom_state_dict(self) -> dict[str, Tensor]:
        state = self.magnitude_state()
        return {**state, "weight": self.weight, "on_input": self.on_input}  # type: ignore[dict-item]

    @classmethod
    def from_tensors(cls, lora_name: str, org_module: nn.Module, tensors: dict[str, Tensor]) -> IA3Module:
        return cls(
            lora_name,
            org_module,
            train_on_input=bool(int(tensors.get("on_input", torch.tensor(0)))),
            **decompose_options(tensors),
        )

    def shrink_parameters(self) -> Sequence[tuple[Tensor, Tensor | float]]:
        return [(self.weight.data, 0.0), *self._shrink_magnitude()]
