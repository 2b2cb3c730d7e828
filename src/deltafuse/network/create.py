"""Creating a network from options, and from a file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ..algorithms import get_algorithm
from ..algorithms.registry import detection_order
from ..core.errors import CheckpointError
from ..core.messages import logger, say_once
from . import files
from .matching import lora_name
from .network import LycorisNetwork
from .options import read_options
from .rules import KOHYA_KEYS, Rules

DEFAULT_RANK = 4


def network_arguments(linear_dim: Any, linear_alpha: Any, given: Mapping[str, Any], extra: frozenset[str]) -> Any:
    """(arguments of a network, options left for the caller) from what a user wrote; names and values are checked."""
    options = read_options(given, extra)
    rank = DEFAULT_RANK if linear_dim is None else int(linear_dim)
    arguments: dict[str, Any] = {
        "lora_dim": rank,
        "alpha": linear_alpha,
        "conv_lora_dim": options.pop("conv_dim", None) or rank,
        "conv_alpha": options.pop("conv_alpha", linear_alpha),
        "network_module": get_algorithm(options.pop("algo", None) or "lora").name,
        "train_norm": options.pop("train_norm", False),
        "train_llm_adapter": options.pop("train_llm_adapter", False),
    }
    rest = {name: options.pop(name) for name in ("preset", *extra) if name in options}
    return {**arguments, **options}, rest


def rules_for(preset: Mapping[str, Any], chosen: bool) -> Rules:
    """The class defaults with a preset on top; the default preset yields to defaults the user set on the class."""
    if chosen and any(key in preset for key in KOHYA_KEYS) and "target_module" not in preset:
        say_once(
            "this preset names classes of a UNet and text encoders, which only kohya networks separate; "
            "here every linear layer (and convolution, where enabled) is a target"
        )
    defaults = LycorisNetwork.default_rules()
    return defaults.with_preset(preset) if chosen or defaults == Rules() else defaults


def build_from_tensors(
    network: LycorisNetwork, root: nn.Module, tensors: Mapping[str, Tensor], source: str, strict: bool = True
) -> None:
    """Fill ``network`` with the modules a file's tensors describe; entries without a layer are an error."""
    own, _ = files.split_kept(tensors)
    layers = {lora_name(network.rules.prefix, path): module for path, module in root.named_modules()}
    names = dict.fromkeys(key.partition(".")[0] for key in own)
    foreign = [name for name in names if name not in layers]
    if foreign and (strict or len(foreign) == len(names)):
        raise files.unmatched(foreign, network.rules.prefix, layers, source)
    if not names:
        raise CheckpointError(f"{source} holds no adapter tensors")
    network.adopt_modules(_read_layer(own, name, layers[name], source) for name in names if name in layers)
    ranks = [item.lora_dim for item in network.loras if hasattr(item, "lora_dim")]
    network.lora_dim, network.network_module = max(ranks, default=0), network.loras[0].name
    network.alpha = next((item.stored_alpha for item in network.loras if hasattr(item, "stored_alpha")), None)
    logger.info(f"{len(network.loras)} modules read from {source}")


def apply_notes(network: LycorisNetwork, metadata: Mapping[str, str]) -> None:
    """What tensors cannot say and metadata does: whether a decomposed layer trains through its norm."""
    try:
        notes = json.loads(metadata.get("deltafuse_layers", "{}"))
    except json.JSONDecodeError:
        logger.warning("the metadata entry 'deltafuse_layers' is not JSON and was left out")
        return
    for adapter in network.loras:
        if adapter.wd:
            note = notes.get(adapter.lora_name, notes.get("*", {}))
            adapter.detach_norm = bool(note.get("detach_norm", adapter.detach_norm))


def _read_layer(tensors: Mapping[str, Tensor], name: str, module: nn.Module, source: str) -> Any:
    for info in detection_order():
        cls = info.module_class
        if cls.algo_check(tensors, name):
            try:
                return cls.make_module_from_state_dict(name, module, *cls.extract_state_dict(tensors, name))
            except KeyError as error:
                raise CheckpointError(
                    f"{source}: layer '{name}' looks like {info.name} but lacks '{error.args[0]}'"
                ) from error
    keys = ", ".join(sorted(key for key in tensors if key.startswith(f"{name}.")))
    known = ", ".join(info.name for info in detection_order())
    raise CheckpointError(
        f"{source}: no algorithm reads the keys of layer '{name}': {keys}. Known algorithms: {known}."
    )
