"""Applying an output-side rotation to a weight or to an output; shared by OFT and BOFT."""

from __future__ import annotations

from torch import Tensor

from ..core.errors import ShapeError
from ..core.geometry import LayerOp
from ..core.precision import accumulate_dtype
from ..deltas import Butterfly, Call, Rotation
from ._run import kernels_for, layer_op


def need(condition: bool, what: str) -> None:
    """Raise ShapeError saying ``what`` unless ``condition``."""
    if not condition:
        raise ShapeError(what)


def blocks_and_rescale(weights: tuple[Tensor | None, ...]) -> tuple[Tensor, Tensor | None]:
    """The two tensors of a rotation, the rescale as a vector (out,)."""
    blocks, *rest = weights
    assert blocks is not None
    rescale = rest[0] if rest else None
    return blocks, None if rescale is None else rescale.reshape(-1)


def rotated_weight(
    delta: Rotation | Butterfly, weight: Tensor, names: tuple[str, ...], strength: float, backend: str | None
) -> Tensor:
    """The change of ``weight`` (out, ...) by an output-side rotation: W's rows are a product's outputs."""
    columns = weight.flatten(1).transpose(0, 1)
    return rotated_output(delta, columns, False, names, strength, backend).transpose(0, 1).reshape(weight.shape)


def rotated_output(
    delta: Rotation | Butterfly,
    y: Tensor,
    channels_first: bool,
    names: tuple[str, ...],
    strength: float,
    backend: str | None,
) -> Tensor:
    """The change of an output ``y`` whose channels are its last axis or axis 1."""
    axis = 1 if channels_first else y.dim() - 1
    channels = y.shape[axis]
    size = delta.blocks.shape[-3] * delta.blocks.shape[-1]
    need(size == channels, f"blocks {tuple(delta.blocks.shape)} rotate {size} channels, the output has {channels}")
    kernel = (1,) * (y.dim() - 1 - axis)
    op = layer_op((channels, channels, *kernel)) if kernel else LayerOp(channels, channels)
    kernels = kernels_for(names, op, y, backend, y.numel() // max(1, channels))
    wide = y.to(accumulate_dtype(y, delta.blocks, delta.rescale))
    return delta.branch(Call(kernels, op, wide, None, None), strength, wide)
