"""LoHa: dW = (alpha / rank) (w1_a w1_b) * (w2_a w2_b), each side with a Tucker core for convolutions on request.

Source: Hyeon-Woo et al. 2021 (FedPara), as in LyCORIS. Keys: hada_w1_a (out, r), hada_w1_b (r, in k), hada_w2_a,
hada_w2_b; with Tucker a (r, out), b (r, in), hada_t1, hada_t2 (r, r, *k); alpha, dora_scale. Starts at zero: w2_a is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..deltas import Delta, Hadamard
from ..layers.state import folded
from .common import Ranked, decompose_options
from .registry import register_algorithm


@register_algorithm(detect_order=20)
class LohaModule(Ranked):
    """Hadamard product of two low-rank matrices: rank up to r^2 from 2 r (out + in) numbers."""

    name = "loha"
    summary = "elementwise product of two low-rank matrices"
    weight_list = [
        "hada_w1_a",
        "hada_w1_b",
        "hada_w2_a",
        "hada_w2_b",
        "hada_t1",
        "hada_t2",
        "alpha",
        "dora_scale",
    ]
    weight_list_det = ["hada_w1_a"]
    hada_w1_a: nn.Parameter
    hada_w1_b: nn.Parameter
    hada_w2_a: nn.Parameter
    hada_w2_b: nn.Parameter
    hada_t1: nn.Parameter
    hada_t2: nn.Parameter
    options = frozenset({"use_tucker", "use_scalar", "weight_decompose", "wd_on_out", "detach_norm", "rs_lora"})

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
        wd_on_out: bool = True,
        bypass_mode: bool | None = None,
        rs_lora: bool = False,
        detach_norm: bool = False,
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
        self.tucker = bool(use_tucker) and self.geometry.window > 1
        self.set_scale(lora_dim, alpha, rs_lora)
        self._build(self.lora_dim)
        self.decompose(weight_decompose, wd_on_out, detach_norm)
        self.set_scalar(use_scalar)
        self._init()

    def _build(self, rank: int) -> None:
        op = self.geometry
        out, inp = op.out, op.group_inp if self.tucker else op.fan_in
        a, b = ((rank, out), (rank, inp)) if self.tucker else ((out, rank), (rank, inp))
        for side in (1, 2):
            if self.tucker:
                self.register_parameter(f"hada_t{side}", nn.Parameter(torch.empty(rank, rank, *op.kernel)))
            self.register_parameter(f"hada_w{side}_a", nn.Parameter(torch.empty(a)))
            self.register_parameter(f"hada_w{side}_b", nn.Parameter(torch.empty(b)))

    def _init(self) -> None:
        if self.tucker:
            nn.init.normal_(self.hada_t1, std=0.1)
            nn.init.normal_(self.hada_t2, std=0.1)
        nn.init.normal_(self.hada_w1_b, std=1.0)
        nn.init.normal_(self.hada_w1_a, std=0.1)
        nn.init.normal_(self.hada_w2_b, std=1.0)
        if self.use_scalar:
            nn.init.normal_(self.hada_w2_a, std=0.1)
        else:
            nn.init.zeros_(self.hada_w2_a)

    def build_delta(self, rank_mask: Tensor | None, row_mask: Tensor | None) -> Delta:
        up1: Tensor = self.hada_w1_a
        up2: Tensor = self.hada_w2_a
        mids: tuple[Any, Any] = (None, None)
        if self.tucker:
            up1, up2, mids = up1.t(), up2.t(), (self.hada_t1, self.hada_t2)
        gain = self.learned_scalar
        return Hadamard(up1, self.hada_w1_b, up2, self.hada_w2_b, self.scale, *mids, gain, row_mask)

    def custom_state_dict(self) -> dict[str, Tensor]:
        state = {**self.magnitude_state(), "alpha": self.alpha_tensor()}
        state["hada_w1_a"] = folded(self.hada_w1_a, self.learned_scalar)
        for key in ("hada_w1_b", "hada_w2_a", "hada_w2_b", *(("hada_t1", "hada_t2") if self.tucker else ())):
            state[key] = getattr(self, key)
        return state

    @classmethod
    def from_tensors(cls, lora_name: str, org_module: nn.Module, tensors: dict[str, Tensor]) -> LohaModule:
        return cls(
            lora_name,
            org_module,
            lora_dim=tensors["hada_w1_b"].shape[0],
            alpha=tensors.get("alpha"),
            use_tucker="hada_t1" in tensors,
            **decompose_options(tensors),
        )

    def shrink_parameters(self) -> Sequence[tuple[Tensor, Tensor | float]]:
        factors = (self.hada_w1_a, self.hada_w1_b, self.hada_w2_a, self.hada_w2_b)
        return [*((item.data, 0.0) for item in factors), *self._shrink_magnitude()]
