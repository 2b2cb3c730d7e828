"""Extraction: the difference between two models as an adapter file.

A layer's difference D = W_tuned - W_base is cut to rank r by its singular value decomposition, D ~ (U S) V^T, and
stored as a LoRA with alpha = r (so its scale is 1). Convolutions are unfolded to (out, in * k) first and may be
compressed once more to a Tucker core. Differences that would gain nothing from it are stored whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from ..core.errors import OptionError, ShapeError, unknown_name
from ..logging import logger
from .merging import TEXT_ENCODER_PREFIX, UNET_PREFIX

Cut = tuple[Any, str]  # ((down, up, residual), "low rank") or (the weight, "full")
MODES = ("fixed", "full", "percentile", "quantile", "ratio", "threshold")
_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NORMS = (nn.LayerNorm, nn.GroupNorm)


def make_sparse(t: torch.Tensor, sparsity: float = 0.95) -> torch.Tensor:
    """``t`` with every entry set to 0 whose size is below the ``sparsity`` quantile of sizes; same shape and dtype."""
    if not 0 <= sparsity <= 1:
        raise OptionError(f"sparsity is a share between 0 and 1, got {sparsity}")
    size = t.detach().abs().double()
    cut = float(np.quantile(size.cpu().numpy(), sparsity)) if size.numel() else 0.0
    return t.masked_fill(size < cut, 0)


def extract_linear(
    weight: torch.Tensor,
    mode: str = "fixed",
    mode_param: float = 0,
    device: str | torch.device = "cpu",
) -> Cut:
    """Cut a (out, in) difference to low rank.

    Args:
        mode: "fixed" (rank ``mode_param``), "threshold" (singular values above it), "ratio" (above that share of the
            largest), "quantile" or "percentile" (leading values up to that share of their sum), or "full".

    Returns:
        ``((down (r, in), up (out, r), residual (out, in)), "low rank")``, or ``(weight, "full")`` where the rank would
        reach half of ``out``. Computed in fp32 or better.
    """
    if weight.dim() != 2:
        raise ShapeError(f"extract_linear takes a weight of shape (out, in), got {tuple(weight.shape)}")
    return _cut(weight.detach().to(device), mode, mode_param, always=False)


def extract_conv(
    weight: torch.Tensor,
    mode: str = "fixed",
    mode_param: float = 0,
    device: str | torch.device = "cpu",
    is_cp: bool = False,
) -> Cut:
    """Cut a convolution's (out, in, *k) difference to low rank; modes as in :func:`extract_linear`.

    Returns:
        ``((down (r, in, *k), up (out, r, 1...), residual (out, in, *k)), "low rank")`` or ``(weight, "full")``; with
        ``is_cp`` always the former.
    """
    if weight.dim() < 3:
        raise ShapeError(f"extract_conv takes a weight of shape (out, in, *k), got {tuple(weight.shape)}")
    return _cut(weight.detach().to(device), mode, mode_param, always=is_cp)


def _cut(weight: torch.Tensor, mode: str, mode_param: float, always: bool) -> Cut:
    if mode not in MODES:
        raise OptionError(unknown_name("extraction mode", mode, MODES))
    if mode == "full":
        return weight, "full"
    out = weight.shape[0]
    work = weight if weight.dtype == torch.float64 else weight.float()
    flat = work.reshape(out, -1)
    if mode == "fixed" and not always and _bounded(int(mode_param), flat) >= out / 2:
        return weight, "full"  # known before the decomposition, which is the slow part
    u, s, vh = torch.linalg.svd(flat, full_matrices=False)
    rank = _bounded(_rank(s, mode, mode_param), flat)
    if rank >= out / 2 and not always:
        return weight, "full"
    up, down = u[:, :rank] * s[:rank], vh[:rank]
    residual = work - (up @ down).reshape(work.shape)
    spatial = [1] * (weight.dim() - 2)
    return (down.reshape(rank, *weight.shape[1:]), up.reshape(out, rank, *spatial), residual), "low rank"


def _bounded(rank: int, flat: torch.Tensor) -> int:
    return max(1, min(rank, *flat.shape))


def _rank(s: torch.Tensor, mode: str, param: float) -> int:
    """How many of the singular values ``s`` (largest first) to keep."""
    if mode == "fixed":
        return int(param)
    if param < 0 or (mode != "threshold" and param > 1):
        legal = "0 or more" if mode == "threshold" else "between 0 and 1"
        raise OptionError(f"extraction mode '{mode}' takes a parameter {legal}, got {param}")
    if mode == "threshold":
        return int((s > param).sum())
    if mode == "ratio":
        return int((s > s.max() * param).sum())
    return int((s.cumsum(0) < s.sum() * param).sum())


@dataclass(frozen=True)
class _Options:
    mode: str
    linear: float
    conv: float
    device: str | torch.device
    use_bias: bool
    sparsity: float
    small_conv: bool


@torch.no_grad()
def extract_diff(
    base_tes: Sequence[nn.Module],
    db_tes: Sequence[nn.Module],
    base_unet: nn.Module,
    db_unet: nn.Module,
    mode: str = "fixed",
    linear_mode_param: float = 0,
    conv_mode_param: float = 0,
    extract_device: str | torch.device = "cpu",
    use_bias: bool = False,
    sparsity: float = 0.98,
    small_conv: bool = True,
) -> dict[str, torch.Tensor]:
    """An adapter (kohya names, fp16) that turns the base models into the tuned ones.

    Args:
        base_tes, db_tes: text encoders before and after tuning, in order; may be empty.
        base_unet, db_unet: the UNet or transformer before and after.
        linear_mode_param, conv_mode_param: the mode's parameter (see :func:`extract_linear`) for linear layers and 1x1
            convolutions, and for larger convolutions.
        use_bias: also store the largest entries of what the low rank leaves out, as sparse tensors.
        sparsity: the share of those entries that is dropped.
        small_conv: compress larger convolutions to a Tucker core.

    Unchanged layers are left out; norm and embedding layers are stored in mode "full" only. The models stay unchanged.
    """
    if mode not in MODES:
        raise OptionError(unknown_name("extraction mode", mode, MODES))
    if len(base_tes) != len(db_tes):
        raise OptionError(f"{len(base_tes)} base text encoders and {len(db_tes)} tuned ones: give them in pairs")
    options = _Options(mode, linear_mode_param, conv_mode_param, extract_device, use_bias, sparsity, small_conv)
    tensors = dict(_extract_model(UNET_PREFIX, base_unet, db_unet, options, embeddings=False))
    for index, (base, tuned) in enumerate(zip(base_tes, db_tes, strict=True)):
        prefix = f"{TEXT_ENCODER_PREFIX}{index + 1}" if len(base_tes) > 1 else TEXT_ENCODER_PREFIX
        tensors.update(_extract_model(prefix, base, tuned, options, embeddings=True))
    logger.info("extracted %d layers", len({key.partition(".")[0] for key in tensors}))
    return tensors


def _extract_model(
    prefix: str, base: nn.Module, tuned: nn.Module, options: _Options, embeddings: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    kinds = (nn.Linear, *_CONVS, *_NORMS, *((nn.Embedding,) if embeddings else ()))
    originals = {name: layer for name, layer in base.named_modules() if isinstance(layer, kinds)}
    pairs = [(name, layer) for name, layer in tuned.named_modules() if name in originals]
    lost_biases = []
    for name, layer in tqdm(pairs, desc=f"extract {prefix}", disable=None, leave=False):
        weight = _difference(name, "weight", originals[name], layer, options.device)
        bias = _difference(name, "bias", originals[name], layer, options.device)
        if weight is None or not (_changed(weight, layer.weight) or _changed(bias, layer.bias)):
            continue
        key = f"{prefix}.{name}".replace(".", "_")
        entries, whole = _extract_layer(layer, weight, bias, options)
        if not whole and _changed(bias, layer.bias):
            lost_biases.append(name)
        for suffix, tensor in entries.items():
            yield f"{key}.{suffix}", tensor
    if lost_biases:
        shown = ", ".join(lost_biases[:6])
        logger.warning("a low-rank layer holds no bias difference; %d left out: %s", len(lost_biases), shown)


def _difference(
    name: str, attr: str, base: nn.Module, tuned: nn.Module, device: str | torch.device
) -> torch.Tensor | None:
    """Tuned minus base, in fp32 or better; None where either lacks the tensor."""
    before, after = getattr(base, attr, None), getattr(tuned, attr, None)
    if before is None or after is None:
        return None
    if before.shape != after.shape:
        raise ShapeError(f"layer '{name}': base {attr} {tuple(before.shape)}, tuned {attr} {tuple(after.shape)}")
    dtype = torch.float64 if torch.float64 in (before.dtype, after.dtype) else torch.float32
    return after.detach().to(device, dtype) - before.detach().to(device, dtype)


def _changed(difference: torch.Tensor | None, tuned: torch.Tensor | None) -> bool:
    """True where an entry moved by more than rounding noise (1e-5 of its size)."""
    if difference is None or tuned is None:
        return False
    size = tuned.detach().to(difference.device, difference.dtype).abs()
    return bool((difference.abs() > 1e-8 + 1e-5 * size).any())


def _extract_layer(
    layer: nn.Module, weight: torch.Tensor, bias: torch.Tensor | None, options: _Options
) -> tuple[dict[str, torch.Tensor], bool]:
    """The tensors of one layer, and whether they hold its difference whole."""
    if options.mode == "full":
        return _whole(layer, weight, bias), True
    if isinstance(layer, nn.Linear):
        cut, kind = extract_linear(weight, options.mode, options.linear, options.device)
    elif isinstance(layer, _CONVS):
        pointwise = all(size == 1 for size in weight.shape[2:])
        cut, kind = extract_conv(weight, options.mode, options.linear if pointwise else options.conv, options.device)
    else:
        return {}, True
    if kind == "full":
        return _whole(layer, weight, bias), True
    down, up, residual = cut
    entries: dict[str, torch.Tensor] = {}
    if options.small_conv and weight.dim() > 2 and any(size != 1 for size in weight.shape[2:]):
        down, mid = _tucker(down)
        if mid is not None:
            entries["lora_mid.weight"] = _stored(mid)
            residual = weight - _rebuild(up, mid, down)
    entries["lora_down.weight"] = _stored(down)
    entries["lora_up.weight"] = _stored(up)
    entries["alpha"] = torch.tensor([down.shape[0]], dtype=torch.float16)
    if options.use_bias:
        entries.update(_sparse(residual.reshape(residual.shape[0], -1), options.sparsity))
    return entries, False


def _tucker(down: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Split a (r, in, *k) factor into a (r, in, 1...) one and a (r, r, *k) core; unsplit where in < r saves nothing."""
    rank, inputs = down.shape[:2]
    if inputs < rank:
        return down, None
    (core, mixer, _), _ = extract_conv(down.transpose(0, 1), "fixed", rank, down.device, is_cp=True)
    return mixer.transpose(0, 1), core.transpose(0, 1)


def _rebuild(up: torch.Tensor, mid: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return torch.einsum("pq...,op,qi->oi...", mid, up.flatten(1), down.flatten(1))


def _whole(layer: nn.Module, weight: torch.Tensor, bias: torch.Tensor | None) -> dict[str, torch.Tensor]:
    names = ("w_norm", "b_norm") if isinstance(layer, _NORMS) else ("diff", "diff_b")
    entries = {names[0]: _stored(weight)}
    if bias is not None:
        entries[names[1]] = _stored(bias)
    return entries


def _sparse(residual: torch.Tensor, sparsity: float) -> dict[str, torch.Tensor]:
    """Coordinates, values and size of the residual's largest entries; 16-bit coordinates where they fit."""
    kept = make_sparse(residual.cpu(), sparsity).to_sparse().coalesce()
    wide = torch.int16 if max(residual.shape) <= torch.iinfo(torch.int16).max else torch.int32
    return {
        "bias_indices": kept.indices().to(wide),
        "bias_values": kept.values().half(),
        "bias_size": torch.tensor(residual.shape, dtype=wide),
    }


def _stored(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", torch.float16).contiguous()
