"""Norm layers as bases: LayerNorm, GroupNorm, RMSNorm of any package, with whatever affine part they have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.geometry import LayerOp
from ..core.precision import accumulate_dtype
from .dense import Base

Affine = Callable[[Tensor, Tensor | None, Tensor | None], Tensor]
_EPSILONS = ("eps", "variance_epsilon", "epsilon")


@dataclass(frozen=True)
class NormKind:
    """kind: name for people. affine: the whole layer with another weight and bias, or None where only the class
    itself knows it. normalize: its output before weight and bias."""

    kind: str
    affine: Affine | None
    normalize: Callable[[Tensor], Tensor]
    channel_axis: int = -1


class NormBase(Base):
    """A norm layer with a weight, a bias or both."""

    kind = "norm"

    def __init__(self, module: nn.Module, norm: NormKind) -> None:
        count = _first(module).numel()
        super().__init__(module, LayerOp(count, count))
        self.norm = norm
        self.owned = norm.affine is not None

    def weight(self) -> Tensor:
        return self.module.weight  # type: ignore[return-value]

    @torch.no_grad()
    def write(self, weight: Tensor | None, bias: Tensor | None) -> None:
        """Replace the stored values of what exists."""
        for stored, value in ((self.module.weight, weight), (self.bias(), bias)):
            if isinstance(stored, Tensor) and value is not None:
                stored.copy_(value.to(device=stored.device, dtype=stored.dtype).view_as(stored))


def norm_kind(module: nn.Module) -> NormKind | None:
    """How ``module`` normalizes, or None where it is no norm layer with an affine part that can be trained."""
    if not any(isinstance(getattr(module, name, None), Tensor) for name in ("weight", "bias")):
        return None
    if isinstance(module, nn.LayerNorm):
        shape, eps = module.normalized_shape, module.eps
        return NormKind(
            "layernorm", lambda x, w, b: F.layer_norm(x, shape, w, b, eps), lambda x: F.layer_norm(x, shape, eps=eps)
        )
    if isinstance(module, nn.GroupNorm):
        groups, group_eps = module.num_groups, module.eps
        return NormKind(
            "groupnorm",
            lambda x, w, b: F.group_norm(x, groups, w, b, group_eps),
            lambda x: F.group_norm(x, groups, eps=group_eps),
            channel_axis=1,
        )
    return _rms_kind(module)


def _rms_kind(module: nn.Module) -> NormKind | None:
    if isinstance(module, nn.RMSNorm):
        shape, eps = list(module.normalized_shape), module.eps
        return NormKind(
            "rmsnorm", lambda x, w, b: F.rms_norm(x, shape, w, eps), lambda x: F.rms_norm(x, shape, None, eps)
        )
    if callable(getattr(module, "_norm", None)):
        return NormKind("rmsnorm", None, module._norm)  # type: ignore[arg-type]
    found = next((getattr(module, name) for name in _EPSILONS if hasattr(module, name)), None)
    if "RMSNorm" in type(module).__name__ and isinstance(found, float):
        return NormKind("rmsnorm", None, lambda x: root_mean_square(x, found))
    return None


def root_mean_square(x: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) over the last axis, in float32 or better."""
    wide = x.to(accumulate_dtype(x))
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)


def _first(module: nn.Module) -> Tensor:
    weight = getattr(module, "weight", None)
    return weight if isinstance(weight, Tensor) else module.bias  # type: ignore[return-value]
