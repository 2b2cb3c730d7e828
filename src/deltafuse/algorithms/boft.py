"""BOFT: m butterfly stages of block rotations on the output, W' = R_m .. R_1 W.

Source: Liu et al. 2023. Keys: oft_blocks (m, num, b, b), rescale (out, 1...), alpha (the stored constraint). Stage i
rotates channels that lie 2^i b/2 apart. Blocks are even, their number a power of two. Starts at the identity.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..core.factorize import butterfly_blocks
from ..deltas import Butterfly, Delta
from .common import check_rank, decompose_options
from .oft import RotationModule, stored_blocks
from .registry import register_algorithm


@register_algorithm(detect_order=80)
class ButterflyOFTModule(RotationModule):
    """``lora_dim`` bounds the block size."""

    name = "boft"
    summary = "butterfly stages of block rotations of the output"
    weight_list = ["oft_blocks", "rescale", "alpha", "dora_scale"]
    weight_list_det = ["oft_blocks"]

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
        constraint: Any = 0,
        rescaled: bool = False,
        bypass_mode: bool | None = None,
        weight_decompose: bool = False,
        wd_on_out: bool = True,
        detach_norm: bool = False,
        **kwargs: Any,
    ) -> None:
        extra = {"use_tucker": use_tucker, "use_scalar": use_scalar, **kwargs}
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
        self.lora_dim = check_rank(lora_dim, lora_name)
        self.block_size, self.block_num = butterfly_blocks(self.dim, self.lora_dim, lora_name)
        self.boft_b = self.block_size
        self.boft_m = (self.block_num - 1).bit_count() + 1
        self.set_constraint(constraint, self.dim)
        shape = (self.boft_m, self.block_num, self.block_size, self.block_size)
        self.oft_blocks = nn.Parameter(torch.zeros(shape))
        self.set_rescale(rescaled)
        self.decompose(weight_decompose, wd_on_out, detach_norm)

    def build_delta(self, rank_mask: Tensor | None, row_mask: Tensor | None) -> Delta:
        rescale = self.rescale.flatten() if self.rescaled else None
        return Butterfly(self.oft_blocks, self.constraint, rescale, row_mask)

    @classmethod
    def algo_check(cls, state_dict: dict[str, Tensor], lora_name: str) -> bool:
        blocks = stored_blocks(state_dict, lora_name)
        return blocks is not None and blocks.dim() == 4

    @classmethod
    def from_tensors(cls, lora_name: str, org_module: nn.Module, tensors: dict[str, Tensor]) -> ButterflyOFTModule:
        return cls(
            lora_name,
            org_module,
            lora_dim=tensors["oft_blocks"].shape[-1],
            constraint=tensors.get("alpha"),
            rescaled="rescale" in tensors,
            **decompose_options(tensors),
        )
