"""OFT: block-diagonal rotations of a layer's output (diag-oft) or of its input (oft).

Source: Qiu et al. 2023. Output side: W'_blk = R^T W_blk, keys oft_blocks (num, s, s) with a free matrix per block whose
skew part is used, rescale (out, 1...), alpha (the stored constraint, not a scale). Input side: y = W (x R) + b, key
oft_R.weight (num, s (s - 1) / 2), the packed upper triangle of a skew matrix per block, as PEFT stores it.
R = (I + Q)(I - Q)^-1. Starts at the identity: all zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import CheckpointError
from ..core.factorize import factorization, rotation_block
from ..core.precision import accumulate_dtype
from ..deltas import Delta, InputRotation, Rotation
from ..layers.adapter import Adapter
from ..layers.state import as_float
from ..primitives.rotation import cayley_delta
from .common import check_rank, decompose_options
from .registry import register_algorithm


class RotationModule(Adapter):
    """What rotation algorithms share: the constraint, its place in files, and the way back to the identity."""

    options = frozenset({"constraint", "rescaled", "weight_decompose", "wd_on_out", "detach_norm"})
    oft_blocks: nn.Parameter
    rescaled = False

    def set_constraint(self, constraint: Any, dimension: int) -> None:
        """The bound on |Q| is constraint * dimension; 0 means none. Files keep the constraint under ``alpha``."""
        self.stored_constraint = as_float(constraint or 0.0)
        self.constraint = self.stored_constraint * dimension
        self._bound_dimension = dimension
        self.register_buffer("alpha", torch.tensor(self.stored_constraint, dtype=torch.float32))

    def set_rescale(self, rescaled: bool) -> None:
        """A learnable factor per output row that starts at 1."""
        self.rescaled = bool(rescaled)
        if self.rescaled:
            self.rescale = nn.Parameter(torch.ones(self.dim, *(1,) * (len(self.shape) - 1)))

    def get_r(self) -> Tensor:
        """The rotations, (..., s, s)."""
        delta = cayley_delta(self.oft_blocks, self.constraint)
        return delta + torch.eye(delta.shape[-1], dtype=delta.dtype, device=delta.device)

    def make_weight(self, scale: float = 1.0, device: Any = None, diff: bool = False) -> Tensor:
        """W' at strength ``scale``, or W' - W with ``diff``."""
        give = self.get_diff_weight if diff else self.get_merged_weight
        return give(scale, device=device)[0]

    @classmethod
    def extract_state_dict(cls, state_dict: dict[str, Tensor], lora_name: str) -> list[Tensor | None]:
        found = super().extract_state_dict(state_dict, lora_name)
        if "oft_blocks" in cls.weight_list:
            found[cls.weight_list.index("oft_blocks")] = stored_blocks(state_dict, lora_name)
        return found

    def adopt(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors = super().adopt(tensors)
        blocks = stored_blocks({f"{self.lora_name}.{key}": value for key, value in tensors.items()}, self.lora_name)
        if blocks is not None and "oft_blocks" not in tensors:
            tensors = {key: value for key, value in tensors.items() if not key.startswith(("oft_blocks.", "oft_diag"))}
            tensors["oft_blocks"] = blocks
        if "alpha" in tensors:
            self.stored_constraint = as_float(tensors["alpha"])
            self.constraint = self.stored_constraint * self._bound_dimension
        tensors["alpha"] = self.constraint_tensor()
        return tensors

    def constraint_tensor(self) -> Tensor:
        """The stored constraint, unrounded by any cast of the module; float64 beside float64 blocks."""
        return torch.tensor(self.stored_constraint, dtype=accumulate_dtype(self.dtype_tensor))

    def custom_state_dict(self) -> dict[str, Tensor]:
        state = self.magnitude_state()
        state["oft_blocks"] = self.oft_blocks
        state["alpha"] = self.constraint_tensor()
        if self.rescaled:
            state["rescale"] = self.rescale
        return state

    def shrink_parameters(self) -> Sequence[tuple[Tensor, Tensor | float]]:
        rescale = [(self.rescale.data, 1.0)] if self.rescaled else []
        return [(self.oft_blocks.data, 0.0), *rescale, *self._shrink_magnitude()]


@register_algorithm(detect_order=70)
class DiagOFTModule(RotationModule):
    """Rotations of the output, before the bias. ``lora_dim`` picks the block size among the dimension's divisors."""

    name = "diag-oft"
    aliases = ("diag_oft",)
    summary = "block rotations of the output (before the bias)"
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
        block_size: int | None = None,
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
        if block_size is None:
            self.block_size, self.block_num = factorization(self.dim, self.lora_dim)
        else:
            self.block_size = rotation_block(self.dim, int(block_size), lora_name, "output")
            self.block_num = self.dim // self.block_size
        self.set_constraint(constraint, self.dim)
        self.oft_blocks = nn.Parameter(torch.zeros(self.block_num, self.block_size, self.block_size))
        self.set_rescale(rescaled)
        self.decompose(weight_decompose, wd_on_out, detach_norm)

    def build_delta(self, rank_mask: Tensor | None, row_mask: Tensor | None) -> Delta:
        rescale = self.rescale.flatten() if self.rescaled else None
        return Rotation(self.oft_blocks, self.constraint, rescale, row_mask)

    @classmethod
    def algo_check(cls, state_dict: dict[str, Tensor], lora_name: str) -> bool:
        blocks = stored_blocks(state_dict, lora_name)
        return blocks is not None and blocks.dim() == 3

    @classmethod
    def from_tensors(cls, lora_name: str, org_module: nn.Module, tensors: dict[str, Tensor]) -> DiagOFTModule:
        size = tensors["oft_blocks"].shape[-1]
        return cls(
            lora_name,
            org_module,
            lora_dim=size,
            constraint=tensors.get("alpha"),
            rescaled="rescale" in tensors,
            block_size=size,
            **decompose_options(tensors),
        )


@register_algorithm(detect_order=75)
class InputOFTModule(RotationModule):
    """Rotations of the input. ``lora_dim`` is the block size; it must divide the input channels of one group."""

    name = "oft"
    aliases = ("input-oft", "input_oft", "oft-in")
    summary = "block rotations of the input (PEFT's and OneTrainer's side)"
    weight_list = ["oft_R.weight", "alpha", "dora_scale"]
    weight_list_det = ["oft_R.weight"]
    options = frozenset({"constraint", "weight_decompose", "wd_on_out", "detach_norm"})

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
        rank_dropout_scale: bool = False,
        constraint: Any = 0,
        bypass_mode: bool | None = None,
        weight_decompose: bool = False,
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
        self.lora_dim = check_rank(lora_dim, lora_name)
        self.block_size = rotation_block(self.geometry.group_inp, self.lora_dim, lora_name, "input")
        self.block_num = self.geometry.inp // self.block_size
        self.set_constraint(constraint, self.geometry.inp)
        packed = self.block_size * (self.block_size - 1) // 2
        self.oft_R = nn.ParameterDict({"weight": nn.Parameter(torch.zeros(self.block_num, packed))})
        self.decompose(weight_decompose, wd_on_out, detach_norm)

    @property
    def oft_blocks(self) -> Tensor:  # type: ignore[override]
        """(num, s, s) with the packed triangle above the diagonal and zeros elsewhere: the skew part is Q."""
        packed = self.oft_R["weight"]
        size = self.block_size
        rows, cols = torch.triu_indices(size, size, 1, device=packed.device)
        blocks = packed.new_zeros(self.block_num, size * size)
        return blocks.index_copy(1, rows * size + cols, packed).view(self.block_num, size, size)

    def build_delta(self, rank_mask: Tensor | None, row_mask: Tensor | None) -> Delta:
        return InputRotation(self.oft_blocks, self.constraint, row_mask)

    def custom_state_dict(self) -> dict[str, Tensor]:
        state = self.magnitude_state()
        state["oft_R.weight"] = self.oft_R["weight"]
        state["alpha"] = self.constraint_tensor()
        return state

    @classmethod
    def from_tensors(cls, lora_name: str, org_module: nn.Module, tensors: dict[str, Tensor]) -> InputOFTModule:
        packed = tensors["oft_R.weight"]
        size = unpacked_size(packed.shape[-1], f"{lora_name}.oft_R.weight")
        return cls(
            lora_name,
            org_module,
            lora_dim=size,
            constraint=tensors.get("alpha"),
            **decompose_options(tensors),
        )

    def shrink_parameters(self) -> Sequence[tuple[Tensor, Tensor | float]]:
        return [(self.oft_R["weight"].data, 0.0), *self._shrink_magnitude()]


def stored_blocks(state_dict: dict[str, Tensor], lora_name: str) -> Tensor | None:
    """A file's output-side blocks for one layer, or None: ``oft_blocks``, the older name ``oft_diag``, or the split
    list ``oft_blocks.0`` .. ``oft_blocks.n`` of (s, s) matrices, which must have no gap and one shape."""
    for key in ("oft_blocks", "oft_diag"):
        if f"{lora_name}.{key}" in state_dict:
            return state_dict[f"{lora_name}.{key}"]
    start = f"{lora_name}.oft_blocks."
    numbered = {key[len(start) :]: value for key, value in state_dict.items() if key.startswith(start)}
    if not numbered:
        return None
    wanted = [str(index) for index in range(len(numbered))]
    if sorted(numbered) != sorted(wanted):
        raise CheckpointError(f"layer '{lora_name}': its split list oft_blocks.0 .. n has the parts {sorted(numbered)}")
    if len({tuple(value.shape) for value in numbered.values()}) > 1:
        raise CheckpointError(f"layer '{lora_name}': the parts of its split list oft_blocks.0 .. n differ in shape")
    return torch.stack([numbered[index] for index in wanted])


def unpacked_size(packed: int, key: str) -> int:
    """s with s (s - 1) / 2 = packed, or a CheckpointError naming the key."""
    size = round((1 + (1 + 8 * packed) ** 0.5) / 2)
    if size * (size - 1) // 2 != packed:
        raise CheckpointError(f"key '{key}' holds {packed} numbers a block, which is no triangle s (s - 1) / 2")
    return size
