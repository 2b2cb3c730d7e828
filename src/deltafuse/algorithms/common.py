"""What ranked algorithms share: rank, alpha, scale, the learnable scalar, and the usual initialisations."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import OptionError
from ..core.precision import accumulate_dtype
from ..layers.adapter import Adapter
from ..layers.state import as_float


def check_rank(value: Any, layer: str, name: str = "lora_dim") -> int:
    """A whole rank of at least 1."""
    rank = int(value)
    if rank < 1 or rank != as_float(value):
        raise OptionError(f"layer '{layer}': {name}={value!r} is not a rank. Legal: whole numbers from 1.")
    return rank


def kaiming(tensor: Tensor) -> None:
    """The uniform initialisation PyTorch gives a linear layer's weight."""
    nn.init.kaiming_uniform_(tensor, a=math.sqrt(5))


class Ranked(Adapter):
    """An adapter with a rank, an alpha and perhaps a learnable scalar.

    scale is alpha / rank, or alpha / sqrt(rank) with rs_lora; the stored alpha makes plain alpha / rank readers agree.
    """

    scale: float
    lora_dim: int
    _placeholder: float | None = None
    """A file's alpha that plays no part, kept so that saving again writes what was read."""

    def set_scale(self, lora_dim: Any, alpha: Any, rs_lora: bool = False, *, ignore_alpha: bool = False) -> None:
        """alpha None or 0 means alpha = rank; ``ignore_alpha`` fixes the scale at 1 whatever was given."""
        self.lora_dim = check_rank(lora_dim, self.lora_name)
        self.rs_lora = bool(rs_lora)
        given = 0.0 if alpha is None or ignore_alpha else as_float(alpha)
        if ignore_alpha or given == 0.0:
            given = float(self.lora_dim)
        root = math.sqrt(self.lora_dim) if self.rs_lora and not ignore_alpha else float(self.lora_dim)
        self.scale = given / root
        self._fixed_scale = ignore_alpha
        self.register_buffer("alpha", torch.tensor(self.stored_alpha, dtype=torch.float32))

    @property
    def stored_alpha(self) -> float:
        """alpha as plain readers of the file need it: scale * rank."""
        return self.scale * self.lora_dim if self._placeholder is None else self._placeholder

    def alpha_tensor(self) -> Tensor:
        """The stored alpha, unrounded by any cast of the module; float64 beside float64 factors."""
        return torch.tensor(self.stored_alpha, dtype=accumulate_dtype(self.dtype_tensor))

    def set_scalar(self, use_scalar: bool) -> None:
        """A learnable scalar that starts at 0, or a constant 1."""
        self.use_scalar = bool(use_scalar)
        if self.use_scalar:
            self.scalar = nn.Parameter(torch.tensor(0.0))
        else:
            self.register_buffer("scalar", torch.tensor(1.0), persistent=False)

    @property
    def learned_scalar(self) -> Tensor | None:
        """The scalar where it is learned, else None."""
        return self.scalar if self.use_scalar else None

    def adopt(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Files hold the scalar folded in and may lack alpha, which then means scale 1."""
        tensors = super().adopt(tensors)
        alpha = tensors.get("alpha")
        stored = float(self.lora_dim) if alpha is None else as_float(alpha)
        if not self._fixed_scale:
            self.scale = (stored or float(self.lora_dim)) / self.lora_dim
        elif alpha is not None:
            self._placeholder = stored
        tensors["alpha"] = self.alpha_tensor()
        if getattr(self, "use_scalar", False):
            tensors["scalar"] = torch.ones(())
        return tensors


def decompose_options(tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Constructor options that a stored magnitude implies: its shape says the axis."""
    magnitude = tensors.get("dora_scale")
    if magnitude is None:
        return {}
    return {"weight_decompose": True, "wd_on_out": not (magnitude.dim() > 1 and magnitude.shape[0] == 1)}
