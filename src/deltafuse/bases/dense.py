"""What an adapter sits on: a layer with a weight that can be read, and perhaps written and multiplied by us."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import MergeError, TargetError
from ..core.geometry import LayerOp
from ..core.verdict import Verdict

PRISTINE = (nn.Linear.forward, nn.Conv1d.forward, nn.Conv2d.forward, nn.Conv3d.forward)


class Base:
    """A full-precision layer. Everything is read from the module at each call, so a swapped weight is the next used.

    ``owned``: the layer's forward is exactly its geometry applied to its weight, so a form may run it itself.
    """

    owned = True
    kind = "dense"

    def __init__(self, module: nn.Module, op: LayerOp) -> None:
        self._module = [module]
        self.op = op

    @property
    def module(self) -> nn.Module:
        return self._module[0]

    def weight(self) -> Tensor:
        """(out, in // groups, *kernel), dense."""
        return self.module.weight  # type: ignore[return-value]

    def bias(self) -> Tensor | None:
        return getattr(self.module, "bias", None)

    def product(self, x: Tensor) -> Tensor:
        """W x without bias."""
        return self.op.apply(x, self.weight())

    def mergeable(self) -> Verdict:
        """Whether a delta can be written into the stored weight."""
        return Verdict(True, "dense weight")

    @torch.no_grad()
    def write(self, weight: Tensor, bias: Tensor | None) -> None:
        """Replace the stored values, rounding once to the stored dtype."""
        verdict = self.mergeable()
        if not verdict:
            raise MergeError(f"{type(self.module).__name__} cannot be merged: {verdict.reason}")
        stored = self.weight()
        stored.copy_(weight.to(device=stored.device, dtype=stored.dtype).view_as(stored))
        if bias is None:
            return
        own = self.bias()
        if own is None:
            self.module.bias = nn.Parameter(bias.to(device=stored.device, dtype=stored.dtype), requires_grad=False)
        else:
            own.copy_(bias.to(device=own.device, dtype=own.dtype))


class ForeignBase(Base):
    """A layer that runs its own forward: a subclass of nn.Linear, a quantized layer, one wrapped by another tool."""

    owned = False
    kind = "foreign"

    def weight(self) -> Tensor:
        weight = self.module.weight
        if isinstance(weight, Tensor) and weight.is_floating_point() and tuple(weight.shape) == self.op.weight_shape:
            return weight if weight.element_size() > 1 else weight.to(torch.float32)
        raise TargetError(
            f"{type(self.module).__name__} stores its weight as {_shape(weight)}, not as a dense "
            f"{self.op.weight_shape} matrix: algorithms that read the base weight cannot sit on it"
        )

    def readable(self) -> Verdict:
        """Whether the dense weight can be read."""
        try:
            self.weight()
        except TargetError as error:
            return Verdict(False, str(error))
        return Verdict(True, "dense weight behind its own forward")

    def mergeable(self) -> Verdict:
        weight = self.module.weight
        if isinstance(weight, Tensor) and weight.is_floating_point() and weight.element_size() > 1:
            return self.readable()
        return Verdict(False, "its weight is quantized")


class ScaledFp8Base(ForeignBase):
    """Weight-only float8: ``weight`` holds codes and ``weight_scale`` one scale per tensor or per output row."""

    kind = "fp8"

    def weight(self) -> Tensor:
        codes: Any = self.module.weight
        scale: Any = self.module.weight_scale
        scale = scale.to(device=codes.device, dtype=torch.float32)
        return codes.to(torch.float32) * (scale.unsqueeze(1) if scale.dim() == 1 else scale)

    def mergeable(self) -> Verdict:
        return Verdict(False, "merging into a weight-only FP8 layer is not supported")


def is_scaled_fp8(module: nn.Module) -> bool:
    """A float8 linear layer recognised by what it has, whatever package it comes from."""
    has_parts = all(hasattr(module, name) for name in ("in_features", "out_features", "weight", "weight_scale"))
    return has_parts and not isinstance(module, (nn.Linear, nn.Conv2d)) and type(module).__name__ == "Fp8Linear"


def is_plain(module: nn.Module) -> bool:
    """Whether the class runs PyTorch's own linear or convolution on a plain floating-point weight."""
    weight = getattr(module, "weight", None)
    return (
        type(module).forward in PRISTINE
        and isinstance(weight, Tensor)
        and type(weight) in (Tensor, nn.Parameter)
        and weight.is_floating_point()
        and weight.element_size() > 1
    )


def base_for(module: nn.Module) -> Base | None:
    """The base behind ``module``, or None where it is neither linear nor convolutional."""
    op = LayerOp.of(module)
    if op is None or isinstance(module, nn.modules.conv._ConvTransposeNd):
        return None
    if is_scaled_fp8(module):
        return ScaledFp8Base(module, op)
    return Base(module, op) if is_plain(module) else ForeignBase(module, op)


def _shape(weight: object) -> str:
    if isinstance(weight, Tensor):
        return f"{weight.dtype} {tuple(weight.shape)}"
    return type(weight).__name__
