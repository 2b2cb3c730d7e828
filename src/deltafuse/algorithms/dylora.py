"""DyLoRA: LoRA whose every prefix of ranks is a LoRA. One random block of ranks is trained per call.

Source: Valipour et al. 2022, as in LyCORIS. Training draws a block b: ranks before it are used but frozen, the block
itself is trained, later ranks are off, and the scale is alpha over the ranks in use. In eval mode, merged and saved
the full rank acts with scale alpha / rank. Exported keys: lora_up.weight, lora_down.weight, alpha, as LoRA's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import CheckpointError, OptionError
from ..core.precision import accumulate_dtype
from ..deltas import Delta, LowRank
from .common import Ranked, check_rank, decompose_options, kaiming
from .registry import register_algorithm


def _capturing(item: Tensor) -> bool:
    """Whether a CUDA graph is being captured, which would freeze what the host draws."""
    return item.is_cuda and torch.cuda.is_current_stream_capturing()


@register_algorithm(detect_order=95)
class DyLoraModule(Ranked):
    """``block_size`` ranks are trained together; it must divide ``lora_dim``."""

    name = "dylora"
    summary = "LoRA trained so that every rank prefix works by itself"
    weight_list = ["lora_up.weight", "lora_down.weight", "alpha", "dora_scale"]
    weight_list_det = ["dylora_up.weight"]
    options = frozenset({"block_size", "use_scalar", "weight_decompose", "wd_on_out", "detach_norm", "rs_lora"})
    rank_axis = True
    draw_on_device = False
    """Draw blocks on the layer's device, as compiled and captured graphs do, also where a graph would not need it.

    Otherwise the block comes from PyTorch's generator of the CPU and only its ranks are computed.
    """

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
        block_size: int = 4,
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
        extra = {"use_tucker": use_tucker, "train_on_input": train_on_input, **kwargs}
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
        self.block_size = check_rank(block_size, lora_name, "block_size")
        self.set_scale(lora_dim, alpha, rs_lora)
        if self.lora_dim % self.block_size:
            legal = [size for size in range(1, self.lora_dim + 1) if self.lora_dim % size == 0]
            raise OptionError(
                f"layer '{lora_name}': block_size={self.block_size} does not divide lora_dim={self.lora_dim}. "
                f"Legal: {', '.join(map(str, legal))}."
            )
        self.block_count = self.lora_dim // self.block_size
        self._build()
        self.decompose(weight_decompose, wd_on_out, detach_norm)
        self.set_scalar(use_scalar)
        self._init()

    def _build(self) -> None:
        out, fan_in, size = self.geometry.out, self.geometry.fan_in, self.block_size
        count = self.block_count
        self.up_list = nn.ParameterList([torch.empty(out, size) for _ in range(count)])
        self.down_list = nn.ParameterList([torch.empty(size, fan_in) for _ in range(count)])

    def _init(self) -> None:
        for block in self.down_list:
            kaiming(block)
        for block in self.up_list:
            if self.use_scalar:
                kaiming(block)
            else:
                nn.init.zeros_(block)

    def _whole(self) -> tuple[Tensor, Tensor]:
        """(up (out, r), down (r, fan_in))."""
        return torch.cat(list(self.up_list), 1), torch.cat(list(self.down_list))

    def build_delta(self, rank_mask: Tensor | None, row_mask: Tensor | None) -> Delta:
        up, down = self._whole()
        return LowRank(down, up, self.scale, None, self.learned_scalar, rank_mask, row_mask)

    def delta(self, masks: bool = False) -> Delta:
        """In training each call draws its block; merged, saved and in eval mode the whole rank acts."""
        if not (masks and self.training):
            return super().delta(masks)
        dropped, row_mask = self._draw_masks()
        if not (self.draw_on_device or torch.compiler.is_compiling() or _capturing(self.up_list[0])):
            return self.decomposed(self._drawn(dropped, row_mask))
        up, down, used = self._sample(*self._whole())
        rank_mask = used if dropped is None else used * dropped
        return self.decomposed(LowRank(down, up, self.scale, None, self.learned_scalar, rank_mask, row_mask))

    def _drawn(self, dropped: Tensor | None, row_mask: Tensor | None) -> LowRank:
        """A block drawn on the host: only the ranks in use are computed, and only its two tensors get gradients."""
        block = int(torch.randint(0, self.block_count, ()))
        ups, downs = list(self.up_list.parameters()), list(self.down_list.parameters())
        up: Tensor = ups[block]
        down: Tensor = downs[block]
        if block:
            up = torch.cat([*(item.detach() for item in ups[:block]), up], 1)
            down = torch.cat([*(item.detach() for item in downs[:block]), down])
        share = self.block_count / (block + 1)
        scale = self.scale * (share**0.5 if self.rs_lora else share)
        rank_mask = None if dropped is None else dropped[: (block + 1) * self.block_size]
        return LowRank(down, up, scale, None, self.learned_scalar, rank_mask, row_mask)

    def _sample(self, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A random block on the device: gradients only through it, later ranks masked, scaled by the ranks in use."""
        block = torch.randint(0, self.block_count, (), device=up.device)
        index = torch.arange(self.lora_dim, device=up.device) // self.block_size
        trained = (index == block).to(up.dtype)
        up = up.detach() + (up - up.detach()) * trained
        down = down.detach() + (down - down.detach()) * trained[:, None]
        ranks = ((block + 1) * self.block_size).to(accumulate_dtype(up))
        share = self.lora_dim / ranks if not self.rs_lora else (self.lora_dim / ranks) ** 0.5
        return up, down, (index <= block).to(ranks.dtype) * share

    def prefix(self, rank: int) -> tuple[Tensor, Tensor, float]:
        """(down, up, scale) of the first ``rank`` ranks, as a LoRA of that rank with the same alpha."""
        rank = min(check_rank(rank, self.lora_name, "rank"), self.lora_dim)
        up, down = self._whole()
        ratio = self.lora_dim / rank
        return down[:rank], up[:, :rank], self.scale * (ratio**0.5 if self.rs_lora else ratio)

    def get_diff_weight(
        self, multiplier: float = 1.0, shape: Any = None, device: Any = None, rank: int | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """As the base class; ``rank`` takes the first ranks only."""
        if rank is None:
            return super().get_diff_weight(multiplier, shape, device)
        down, up, scale = self.prefix(rank)
        delta = LowRank(down, up, scale, None, self.learned_scalar)
        dense = delta.dense(None, self.geometry, multiplier)
        return (dense if shape is None else dense.reshape(shape)).to(device=device), None

    def custom_state_dict(self) -> dict[str, Tensor]:
        up, down = self._whole()
        if self.learned_scalar is not None:
            up = up * self.learned_scalar
        down = down.view(self.lora_dim, *self.shape[1:])
        ones = (1,) * len(self.geometry.kernel)
        return {
            **self.magnitude_state(),
            "alpha": self.alpha_tensor(),
            "lora_up.weight": up.view(*up.shape, *ones),
            "lora_down.weight": down,
        }

    def adopt(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors = super().adopt(tensors)
        up, down = tensors.pop("lora_up.weight", None), tensors.pop("lora_down.weight", None)
        if up is not None and down is not None:
            self._check_file_rank(up.shape[1], down.shape[0])
            for index, (left, right) in enumerate(
                zip(up.flatten(1).split(self.block_size, 1), down.flatten(1).split(self.block_size), strict=True)
            ):
                tensors[f"up_list.{index}"], tensors[f"down_list.{index}"] = left, right
        return tensors

    def _check_file_rank(self, up: int, down: int) -> None:
        if up != self.lora_dim or down != self.lora_dim:
            raise CheckpointError(
                f"layer '{self.lora_name}': the file's lora_up.weight and lora_down.weight have rank {up} and {down}, "
                f"the module has rank {self.lora_dim}"
            )

    @classmethod
    def from_tensors(cls, lora_name: str, org_module: nn.Module, tensors: dict[str, Tensor]) -> DyLoraModule:
        rank = tensors["lora_down.weight"].shape[0]
        options = decompose_options(tensors)
        return cls(lora_name, org_module, lora_dim=rank, alpha=tensors.get("alpha"), block_size=1, **options)

    def shrink_parameters(self) -> Sequence[tuple[Tensor, Tensor | float]]:
        return [*((block.data, 0.0) for block in self.up_list), *self._shrink_magnitude()]
