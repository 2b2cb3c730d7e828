"""The operation a layer performs, as data: one description for linear layers and convolutions of any rank."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


@dataclass(frozen=True)
class LayerOp:
    """Geometry of a linear layer (``kernel == ()``) or a convolution.

    The weight is (out, in // groups, *kernel). ``pad`` holds the explicit padding in ``F.pad`` order where the
    padding mode is not "zeros"; ``padding`` is what the convolution itself pads with zeros.
    """

    out: int
    inp: int
    kernel: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    padding: tuple[int, ...] | str = ()
    dilation: tuple[int, ...] = ()
    groups: int = 1
    pad_mode: str = "zeros"
    pad: tuple[int, ...] = ()

    @classmethod
    def of(cls, module: nn.Module) -> LayerOp | None:
        """The geometry of ``module``, or None where it is neither linear nor a (non-transposed) convolution."""
        if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            zeros = module.padding_mode == "zeros"
            return cls(
                out=module.out_channels,
                inp=module.in_channels,
                kernel=tuple(module.kernel_size),
                stride=tuple(module.stride),
                padding=(module.padding if isinstance(module.padding, str) else tuple(module.padding))
                if zeros
                else (0,) * len(module.kernel_size),
                dilation=tuple(module.dilation),
                groups=module.groups,
                pad_mode=module.padding_mode,
                pad=() if zeros else tuple(module._reversed_padding_repeated_twice),
            )
        out, inp = getattr(module, "out_features", None), getattr(module, "in_features", None)
        return cls(out=out, inp=inp) if isinstance(out, int) and isinstance(inp, int) else None

    @property
    def is_conv(self) -> bool:
        return bool(self.kernel)

    @property
    def group_inp(self) -> int:
        """Input channels a single output channel sees."""
        return self.inp // self.groups

    @property
    def window(self) -> int:
        """Kernel positions: 1 for a linear layer."""
        return math.prod(self.kernel)

    @property
    def weight_shape(self) -> tuple[int, ...]:
        return (self.out, self.group_inp, *self.kernel)

    @property
    def fan_in(self) -> int:
        """Columns of the weight as a matrix."""
        return self.group_inp * self.window

    @property
    def channel_dim(self) -> int:
        """Index of the channel axis counted from the end, so that unbatched inputs work as well."""
        return -1 - len(self.kernel)

    def channels(self, vector: Tensor) -> Tensor:
        """A per-channel vector (C,) shaped to broadcast over this layer's inputs or outputs."""
        return vector.reshape(-1, *(1,) * len(self.kernel))

    def channels_of(self, matrix: Tensor) -> Tensor:
        """(batch, C) shaped to broadcast over this layer's batched inputs or outputs."""
        return matrix.reshape(*matrix.shape, *(1,) * len(self.kernel))

    def rows(self, x: Tensor) -> int:
        """Output positions computed from ``x``: the M of the equivalent matrix product."""
        if not self.is_conv:
            return x.numel() // max(1, x.shape[-1])
        spatial = x.shape[len(x.shape) - len(self.kernel) :]
        batch = x.shape[0] if x.dim() == len(self.kernel) + 2 else 1
        strides = math.prod(self.stride)
        return max(1, batch * math.prod(spatial) // strides)

    def prepad(self, x: Tensor) -> Tensor:
        """``x`` padded by the modes a convolution call cannot pad by itself."""
        return F.pad(x, self.pad, mode=self.pad_mode) if self.pad else x

    def apply(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """The layer's own operation with another weight."""
        if not self.is_conv:
            return F.linear(x, weight, bias)
        return self.convolve(self.prepad(x), weight, bias, self.groups)

    def convolve(self, padded: Tensor, weight: Tensor, bias: Tensor | None, groups: int) -> Tensor:
        """The strided, dilated convolution on an input that went through :meth:`prepad`."""
        conv = _CONV[len(self.kernel)]
        return conv(padded, weight, bias, self.stride, self.padding, self.dilation, groups)

    def pointwise(self, x: Tensor, weight: Tensor, groups: int = 1) -> Tensor:
        """A channel-mixing product (C_out, C_in / groups) at every position."""
        if not self.is_conv:
            return F.linear(x, weight)
        conv = _CONV[len(self.kernel)]
        return conv(x, weight.reshape(*weight.shape[:2], *(1,) * len(self.kernel)), None, groups=groups)

    def describe(self) -> str:
        """For people: ``linear 640 -> 320`` or ``conv2d 320 -> 640, kernel 3x3``."""
        if not self.is_conv:
            return f"linear {self.inp} -> {self.out}"
        size = "x".join(str(side) for side in self.kernel)
        grouped = f", groups {self.groups}" if self.groups > 1 else ""
        return f"conv{len(self.kernel)}d {self.inp} -> {self.out}, kernel {size}{grouped}"
