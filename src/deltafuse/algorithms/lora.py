"""LoRA and LoCon: dW = (alpha / rank) up down, for convolutions also with a Tucker core (lora_mid).

Sources: Hu et al. 2021 (LoRA); the convolution and Tucker forms as in LyCORIS. Keys: lora_up.weight (out, r[, 1...]),
lora_down.weight (r, in[, *k or 1...]), lora_mid.weight (r, r, *k), alpha, dora_scale. Starts at zero: up is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from ..deltas import Delta, LowRank
from ..layers.state import folded
from .common import Ranked, decompose_options, kaiming
from .registry import register_algorithm


@register_algorithm(detect_order=10)
class LoConModule(Ranked):
    """LoRA for linear layers, LoCon for convolutions; grouped convolutions share the down factor between groups."""

    name = "locon"
    aliases = ("lora",)
    summary = "low-rank up x down, Tucker core for convolutions on request"
    weight_list = ["lora_up.weight", "lora_down.weight", "lora_mid.weight", "alpha", "dora_scale"]
    weight_list_det = ["lora_up.weight"]
    options = frozenset({"use_tucker", "use_scalar", "weight_decompose", "wd_on_out", "detach_norm", "rs_lora"})
    rank_axis = True

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
        self.isconv = self.geometry.is_conv
        self.set_scale(lora_dim, alpha, rs_lora)
        self._build(self.lora_dim)
        self.decompose(weight_decompose, wd_on_out, detach_norm)
        self.set_scalar(use_scalar)
        self._init()

    def _build(self, rank: int) -> None:
        op = self.geometry
        if not op.is_conv:
            self.lora_down: nn.Module = nn.Linear(op.inp, rank, bias=False)
            self.lora_up: nn.Module = nn.Linear(rank, op.out, bias=False)
            return
        conv = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[len(op.kernel)]
        shape = {"kernel_size": op.kernel, "stride": op.stride, "padding": op.padding, "dilation": op.dilation}
        if self.tucker:
            self.lora_down = conv(op.group_inp, rank, 1, bias=False)
            self.lora_mid = conv(rank, rank, bias=False, **shape)  # type: ignore[arg-type]
        else:
            self.lora_down = conv(op.group_inp, rank, bias=False, **shape)  # type: ignore[arg-type]
        self.lora_up = conv(rank, op.out, 1, bias=False)

    def _init(self) -> None:
        kaiming(self.lora_down.weight)  # type: ignore[arg-type]
        if self.use_scalar:
            kaiming(self.lora_up.weight)  # type: ignore[arg-type]
        else:
            nn.init.zeros_(self.lora_up.weight)  # type: ignore[arg-type]
        if self.tucker:
            kaiming(self.lora_mid.weight)  # type: ignore[arg-type]

    def build_delta(self, rank_mask: Tensor | None, row_mask: Tensor | None) -> Delta:
        up: Any = self.lora_up.weight
        down: Any = self.lora_down.weight
        mid: Any = self.lora_mid.weight if self.tucker else None
        return LowRank(down, up.flatten(1), self.scale, mid, self.learned_scalar, rank_mask, row_mask)

    def make_weight(self, device: Any = None) -> Tensor:
        """up down without the scale, as a dense weight."""
        return (self.get_weight() / self.scale).to(device=device)

    def custom_state_dict(self) -> dict[str, Tensor]:
        up: Any = self.lora_up.weight
        state = {**self.magnitude_state(), "alpha": self.alpha_tensor()}
        state["lora_up.weight"] = folded(up, self.learned_scalar)
        state["lora_down.weight"] = self.lora_down.weight  # type: ignore[assignment]
        if self.tucker:
            state["lora_mid.weight"] = self.lora_mid.weight  # type: ignore[assignment]
        return state

    @classmethod
    def from_tensors(cls, lora_name: str, org_module: nn.Module, tensors: dict[str, Tensor]) -> LoConModule:
        return cls(
            lora_name,
            org_module,
            lora_dim=tensors["lora_down.weight"].shape[0],
            alpha=tensors.get("alpha"),
            use_tucker="lora_mid.weight" in tensors,
            **decompose_options(tensors),
        )

    def shrink_parameters(self) -> Sequence[tuple[Tensor, Tensor | float]]:
        return [(self.lora_up.weight.data, 0.0), *self._shrink_magnitude()]  # type: ignore[list-item]
