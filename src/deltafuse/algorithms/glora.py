"""GLoRA: dW = scale (W a1 a2 + b1 b2), that is y = W (x + scale a1 a2 x) + scale b1 b2 x + b.

Source: Chavan et al. 2023, as in LyCORIS. Keys: a1.weight (in, r[, 1...]), a2.weight (r, in[, 1...]), b1.weight
(out, r[, 1...]), b2.weight (r, in[, *k or 1...]), bm.weight (r, r, *k) with Tucker, alpha. Grouped convolutions share
the factors between groups, so "in" counts one group's channels. Starts at zero: a2 and b2 are 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from ..deltas import Delta, Generalized, LowRank
from ..layers.masks import keep_mask
from ..layers.state import folded
from .common import Ranked, decompose_options, kaiming
from .registry import register_algorithm


@register_algorithm(detect_order=90)
class GLoRAModule(Ranked):
    """A low-rank prologue on x and a low-rank epilogue on y."""

    name = "glora"
    summary = "low-rank prologue on the input plus low-rank epilogue on the output"
    weight_list = ["a1.weight", "a2.weight", "b1.weight", "b2.weight", "bm.weight", "alpha", "dora_scale"]
    weight_list_det = ["a1.weight"]
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
        bypass_mode: bool | None = None,
        rs_lora: bool = False,
        wd_on_out: bool = True,
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
        inp, out = op.group_inp, op.out
        if not op.is_conv:
            self.a2: nn.Module = nn.Linear(inp, rank, bias=False)
            self.a1: nn.Module = nn.Linear(rank, inp, bias=False)
            self.b2: nn.Module = nn.Linear(inp, rank, bias=False)
            self.b1: nn.Module = nn.Linear(rank, out, bias=False)
            return
        conv = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[len(op.kernel)]
        self.a2 = conv(inp, rank, 1, bias=False)
        self.a1 = conv(rank, inp, 1, bias=False)
        if self.tucker:
            self.b2 = conv(inp, rank, 1, bias=False)
            self.bm = conv(rank, rank, op.kernel, bias=False)  # type: ignore[arg-type]
        else:
            self.b2 = conv(inp, rank, op.kernel, bias=False)  # type: ignore[arg-type]
        self.b1 = conv(rank, out, 1, bias=False)

    def _init(self) -> None:
        for layer in (self.a1, self.b1):
            kaiming(layer.weight)  # type: ignore[arg-type]
        for layer in (self.a2, self.b2):
            if self.use_scalar:
                kaiming(layer.weight)  # type: ignore[arg-type]
            else:
                nn.init.zeros_(layer.weight)  # type: ignore[arg-type]
        if self.tucker:
            kaiming(self.bm.weight)

    def build_delta(self, rank_mask: Tensor | None, row_mask: Tensor | None) -> Delta:
        a1, a2, b1, b2 = (self._factor(name) for name in ("a1", "a2", "b1", "b2"))
        bm: Any = self.bm.weight if self.tucker else None
        gain = self.learned_scalar
        prologue = LowRank(a2.flatten(1), a1.flatten(1), self.scale, None, gain, rank_mask)
        epilogue = LowRank(b2, b1.flatten(1), self.scale, bm, gain, self._second_mask(rank_mask))
        return Generalized(prologue, epilogue, row_mask)

    def _second_mask(self, first: Tensor | None) -> Tensor | None:
        """The epilogue drops ranks of its own."""
        if first is None:
            return None
        return keep_mask(self.lora_dim, self.rank_dropout, self.rank_dropout_scale, first)

    def _factor(self, name: str) -> Tensor:
        return getattr(self, name).weight

    def custom_state_dict(self) -> dict[str, Tensor]:
        state = {**self.magnitude_state(), "alpha": self.alpha_tensor()}
        for name in ("a1", "a2", "b1", "b2"):
            scalar = self.learned_scalar if name in ("a2", "b2") else None
            state[f"{name}.weight"] = folded(self._factor(name), scalar)
        if self.tucker:
            state["bm.weight"] = self.bm.weight
        return state

    @classmethod
    def from_tensors(cls, lora_name: str, org_module: nn.Module, tensors: dict[str, Tensor]) -> GLoRAModule:
        return cls(
            lora_name,
            org_module,
            lora_dim=tensors["a2.weight"].shape[0],
            alpha=tensors.get("alpha"),
            use_tucker="bm.weight" in tensors,
            **decompose_options(tensors),
        )

    def shrink_parameters(self) -> Sequence[tuple[Tensor, Tensor | float]]:
        pairs: list[tuple[Tensor, Tensor | float]] = [(self._factor(name).data, 0.0) for name in ("a2", "b2")]
        return [*pairs, *self._shrink_magnitude()]
