"""Which modules a network wraps and how: the rules of a preset, owned by one network."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..core.errors import OptionError, nearest

DEFAULT_TARGETS = ("Linear", "Conv1d", "Conv2d", "Conv3d", "GroupNorm", "LayerNorm")

KEY_TO_FIELD = {
    "enable_conv": "enable_conv",
    "target_module": "target_module",
    "target_name": "target_name",
    "module_algo_map": "module_algo_map",
    "name_algo_map": "name_algo_map",
    "lora_prefix": "prefix",
    "use_fnmatch": "use_fnmatch",
    "exclude_name": "exclude_name",
}
KOHYA_KEYS = ("unet_target_module", "unet_target_name", "text_encoder_target_module", "text_encoder_target_name")


@dataclass(frozen=True)
class Rules:
    """target_module: class names, whose supported children are all wrapped. target_name: patterns of full paths,
    wrapped singly. The maps hold per-class and per-name overrides {algo, dim, alpha, options}."""

    enable_conv: bool = True
    target_module: tuple[str, ...] = DEFAULT_TARGETS
    target_name: tuple[str, ...] = ()
    module_algo_map: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    name_algo_map: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    prefix: str = "lycoris"
    use_fnmatch: bool = False
    exclude_name: tuple[str, ...] = ()

    def with_preset(self, preset: Mapping[str, Any]) -> Rules:
        """These rules with a preset's keys on top; an unknown key is an error with the nearest one."""
        changes: dict[str, Any] = {}
        for key, value in preset.items():
            if key in KOHYA_KEYS:
                continue
            if key not in KEY_TO_FIELD:
                legal = (*KEY_TO_FIELD, *KOHYA_KEYS)
                close = nearest(key, legal)
                hint = f" Did you mean '{close}'?" if close else ""
                raise PresetKeyError(f"unknown preset key '{key}'.{hint} Legal: {', '.join(legal)}.")
            changes[KEY_TO_FIELD[key]] = tuple(value) if isinstance(value, list) else value
        return replace(self, **changes)

    def matches(self, pattern: str, path: str) -> bool:
        """Whether ``pattern`` (fnmatch, or a regular expression from the start) fits a full module path."""
        if self.use_fnmatch:
            return fnmatch.fnmatch(path, pattern)
        try:
            return bool(re.match(pattern, path))
        except re.error as error:
            raise OptionError(f"target pattern {pattern!r} is no regular expression: {error}") from None

    def any_match(self, patterns: Iterable[str], path: str) -> bool:
        return any(pattern == path or self.matches(pattern, path) for pattern in patterns)

    def excluded(self, path: str) -> bool:
        return bool(path) and self.any_match(self.exclude_name, path)

    def name_config(self, path: str) -> Mapping[str, Any] | None:
        """The per-name override for ``path``: an exact name before the first pattern that fits."""
        if path in self.name_algo_map:
            return self.name_algo_map[path]
        return next((value for key, value in self.name_algo_map.items() if self.matches(key, path)), None)


class PresetKeyError(OptionError, KeyError):
    """A preset holds a key that means nothing."""

    __str__ = OptionError.__str__
