"""Merging an adapter file into the models it was made for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..core.errors import CheckpointError, MergeError
from ..logging import logger
from .names import convert_diffusers_name_to_compvis

UNET_PREFIX = "lora_unet"
TEXT_ENCODER_PREFIX = "lora_te"


@torch.no_grad()
def merge(
    tes: Sequence[nn.Module],
    unet: nn.Module,
    lyco_state_dict: Mapping[str, torch.Tensor],
    scale: float = 1.0,
    device: str | torch.device = "cpu",
) -> dict[str, Any]:
    """Add every delta of ``lyco_state_dict`` times ``scale`` to the weights of ``tes`` and ``unet``.

    One text encoder is named ``lora_te_``, several ``lora_te1_``, ``lora_te2_``...; the UNet's layers are found under
    their diffusers and under their original names. The mapping is left as it is; deltas are computed on ``device``.

    Returns:
        ``{"merged": number of layers, "unused": names in the file that no layer answered to}``.

    Raises:
        MergeError: a tensor or a merged weight holds NaN or Inf, or a layer cannot be merged (before any is written).
        CheckpointError: no layer of these models is in the file, or a layer's tensors are of no known algorithm.
    """
    groups = _by_layer(lyco_state_dict)
    adapters = []
    used: set[str] = set()
    for prefix, model in _named_models(tes, unet):
        for layer, owner in _matches(prefix, model, groups):
            adapters.append(adapter_from_tensors(groups[owner], owner, layer).to(device))
            used.add(owner)
    unused = sorted(set(groups) - used)
    if not adapters:
        raise CheckpointError(f"no layer of these models is in the file. It holds: {_sample(unused)}.")
    _merge_all(adapters, _named_models(tes, unet), scale)
    if unused:
        logger.warning("merged %d layers; %d names matched no layer: %s", len(used), len(unused), _sample(unused))
    return {"merged": len(used), "unused": unused}


def _by_layer(state_dict: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """Tensors in fp32, grouped by the name before the first dot. Refuses values that are not finite."""
    groups: dict[str, dict[str, torch.Tensor]] = {}
    for key, value in state_dict.items():
        layer, _, rest = key.partition(".")
        if not rest:
            continue
        tensor = value.detach().cpu()
        tensor = tensor.float() if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor
        # LoKr with two full factors stores a placeholder alpha that may round to inf; it is never used.
        if rest != "alpha" and not bool(torch.isfinite(tensor).all()):
            raise MergeError(f"'{key}' holds NaN or Inf; nothing was merged")
        groups.setdefault(layer, {})[rest] = tensor
    return groups


def _named_models(tes: Sequence[nn.Module], unet: nn.Module) -> list[tuple[str, nn.Module]]:
    encoders = list(tes)
    numbered = len(encoders) > 1
    named = [(f"{TEXT_ENCODER_PREFIX}{i + 1 if numbered else ''}", te) for i, te in enumerate(encoders)]
    return [*named, (UNET_PREFIX, unet)]


def _matches(prefix: str, model: nn.Module, groups: Mapping[str, Any]) -> list[tuple[nn.Module, str]]:
    """(layer, name in the file) of every layer of ``model`` the file holds, in model order."""
    known = {convert_diffusers_name_to_compvis(name): name for name in groups}
    known.update({name: name for name in groups})
    found = []
    for path, layer in model.named_modules():
        name = f"{prefix}_{path}".replace(".", "_") if path else prefix
        owner = known.get(name) or known.get(convert_diffusers_name_to_compvis(name))
        if owner is not None:
            found.append((layer, owner))
    return found


def _merge_all(adapters: Sequence[Any], models: Sequence[tuple[str, nn.Module]], scale: float) -> None:
    """Check every layer, then write every layer, as a network of these adapters does it."""
    from ..network import LycorisNetwork

    holder = nn.Module()
    for name, model in models:
        holder.add_module(name, model)
    network = LycorisNetwork(holder, init_only=True)
    network.adopt_modules(adapters)
    network.merge_to(scale)


def adapter_from_tensors(tensors: Mapping[str, torch.Tensor], name: str, layer: nn.Module) -> Any:
    """The adapter that ``tensors`` (by key without the layer's name) describe, on ``layer``."""
    from ..modules import get_module, make_module

    algorithm, params = get_module({f"{name}.{key}": value for key, value in tensors.items()}, name)
    adapter = None if algorithm is None else make_module(algorithm, params, name, layer)
    if adapter is None:
        raise CheckpointError(f"layer '{name}': the keys {', '.join(sorted(tensors))} belong to no known algorithm")
    return adapter


def _sample(names: Sequence[str], limit: int = 6) -> str:
    shown = ", ".join(names[:limit]) or "no named layer"
    return f"{shown}, and {len(names) - limit} more" if len(names) > limit else shown
