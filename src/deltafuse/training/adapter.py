"""From adapter options to a network on a model."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from ..core.errors import OptionError, TargetError, unknown_name
from .config import AdapterConfig
from .targets import LINEAR_AND_CONV, adaptable, in_blocks, resolve

HAVE_FLAGS = {
    "algo": "--algo",
    "linear_dim": "--rank",
    "linear_alpha": "--alpha",
    "conv_dim": "--conv-rank",
    "conv_alpha": "--conv-alpha",
    "preset": "--preset",
    "multiplier": "--strength",
}


OWN_FLAGS = {key: flag for key, flag in HAVE_FLAGS.items() if not key.startswith("conv_")}
"""Those of commands without flags for convolutions."""


def build_network(model: nn.Module, config: AdapterConfig, kinds: tuple[type[nn.Module], ...]) -> Any:
    """``create_lycoris`` for ``config``; ``kinds`` are the layer classes of the task's own choice.

    Raises OptionError (unknown option or algorithm), TargetError (no layer) or ShapeError (no legal block).
    """
    import deltafuse

    options = parse_options(config.option)
    norms = options.get("train_norm") is True
    alpha = config.rank if config.alpha is None else config.alpha
    if config.conv_rank is not None:
        options["conv_dim"] = config.conv_rank
    if config.conv_alpha is not None:
        options["conv_alpha"] = config.conv_alpha
    preset = layer_preset(model, config, kinds, norms)
    return deltafuse.create_lycoris(
        model, config.strength, linear_dim=config.rank, linear_alpha=alpha, algo=config.algo, preset=preset, **options
    )


def check_texts(config: AdapterConfig) -> None:
    """OptionError for what is wrong in any model: an unknown algorithm or preset, a broken option or override."""
    from ..algorithms import get_algorithm

    get_algorithm(config.algo)
    parse_options(config.option)
    for text in config.override:
        get_algorithm(parse_override(text)[1].get("algo", config.algo))
    if config.preset is not None:
        _named_preset(config.preset)


def layer_preset(
    model: nn.Module, config: AdapterConfig, kinds: tuple[type[nn.Module], ...], norms: bool
) -> dict[str, Any]:
    """A preset as a mapping: the named one, or the layers of the blocks, changed by target, exclude and override."""
    every = adaptable(model, LINEAR_AND_CONV, norms)
    targets = resolve(config.target, every, "target")
    excluded = resolve(config.exclude, every, "exclude")
    overrides = _overrides(config.override, every)
    if config.preset is not None:
        return _change_preset(_named_preset(config.preset), targets, excluded, overrides)
    chosen = targets or in_blocks(model, adaptable(model, kinds, norms))
    chosen = [name for name in dict.fromkeys([*chosen, *overrides]) if name not in set(excluded)]
    if not chosen:
        raise TargetError(
            f"no layer of {type(model).__name__} is left to adapt: it has {len(every)} linear and convolution layers, "
            f"{len(excluded)} of them excluded. Name some with --target."
        )
    return {
        "enable_conv": True,
        "target_module": [],
        "target_name": chosen,
        "exclude_name": excluded,
        "module_algo_map": {},
        "name_algo_map": overrides,
        "use_fnmatch": True,
    }


def _named_preset(name: str) -> dict[str, Any]:
    from ..config import PRESET
    from ..utils.preset import read_preset

    if name in PRESET:
        return dict(PRESET[name])
    if not name.lower().endswith(".toml"):
        raise OptionError(unknown_name("preset", name, PRESET) + " A file must end in .toml.")
    return dict(read_preset(name))


def _change_preset(
    preset: dict[str, Any], targets: list[str], excluded: list[str], overrides: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """Add resolved names to a preset, written as its own kind of pattern."""

    def exact(name: str) -> str:
        return name if preset.get("use_fnmatch") else f"{re.escape(name)}$"

    added = {
        "target_name": [*(preset.get("target_name") or []), *map(exact, targets)],
        "exclude_name": [*(preset.get("exclude_name") or []), *map(exact, excluded)],
        "name_algo_map": {**{exact(k): v for k, v in overrides.items()}, **(preset.get("name_algo_map") or {})},
    }
    return {**preset, **{key: value for key, value in added.items() if value}}


def _overrides(texts: Sequence[str], names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Layer name -> options; where several overrides mean a layer, the last one counts."""
    found: dict[str, dict[str, Any]] = {}
    for text in texts:
        pattern, options = parse_override(text)
        found.update(dict.fromkeys(resolve([pattern], names, "override"), options))
    return found


def parse_override(text: str) -> tuple[str, dict[str, Any]]:
    """``'NAME=algo:lora,rank:8,alpha:4'`` as (NAME, {"algo": "lora", "dim": 8, "alpha": 4})."""
    pattern, equals, rest = text.rpartition("=")
    pairs = [item.partition(":") for item in rest.split(",")]
    if not equals or not pattern or any(not key.strip() or not colon or not value for key, colon, value in pairs):
        raise OptionError(f"option 'override' is '{text}'; it must look like 'NAME=algo:lora,rank:8,alpha:4'.")
    options = {key.strip(): _value(value.strip()) for key, _, value in pairs}
    if "rank" in options:
        options["dim"] = options.pop("rank")
    return pattern.strip(), options


def parse_options(texts: Sequence[str], flags: Mapping[str, str] = HAVE_FLAGS) -> dict[str, Any]:
    """``key=value`` texts: true, false, none, numbers, strings; names that have a flag of their own are refused."""
    options: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        key = key.strip().replace("-", "_")
        if not equals or not key or not value.strip():
            raise OptionError(f"option 'option' is '{text}'; it must look like 'dora_wd=true'.")
        if key in flags:
            raise OptionError(f"option '{key}' has a flag of its own: use {flags[key]}.")
        options[key] = _value(value.strip())
    return options


def _value(text: str) -> Any:
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return value if isinstance(value, (int, float)) else text
