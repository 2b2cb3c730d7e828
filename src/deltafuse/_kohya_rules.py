"""Which layers a kohya network wraps: one set of rules for the UNet, one for the text encoders."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from .core.messages import say_once
from .network import Rules, find_targets
from .network.matching import Matches

UNET_KEYS = {"unet_target_module": "target_module", "unet_target_name": "target_name"}
TEXT_KEYS = {"text_encoder_target_module": "target_module", "text_encoder_target_name": "target_name"}
_GENERIC_KEYS = ("target_module", "target_name", "lora_prefix")
T5_CLASSES = ("T5Attention", "T5DenseActDense", "T5DenseGatedActDense")
LLM_ADAPTER = "LLMAdapterTransformerBlock"


@dataclass(frozen=True)
class KohyaRules:
    """The two sets of rules; what a preset says for both models is in both."""

    unet: Rules
    text_encoder: Rules

    def with_preset(self, preset: Mapping[str, Any]) -> KohyaRules:
        """These rules with a preset's keys on top; an unknown key is an error with the nearest one."""
        idle = [key for key in _GENERIC_KEYS if key in preset]
        if idle:
            say_once(
                f"preset keys {', '.join(idle)} do not act on kohya networks; use the unet_ and text_encoder_ keys"
            )
        shared = {key: value for key, value in preset.items() if key not in _GENERIC_KEYS}
        return KohyaRules(
            self.unet.with_preset({**shared, **_own(preset, UNET_KEYS)}),
            self.text_encoder.with_preset({**shared, **_own(preset, TEXT_KEYS)}),
        )

    def with_t5(self) -> KohyaRules:
        """With the attention and MLP classes of T5 among the text encoders' targets."""
        classes = tuple(dict.fromkeys((*self.text_encoder.target_module, *T5_CLASSES)))
        return replace(self, text_encoder=replace(self.text_encoder, target_module=classes))


def _own(preset: Mapping[str, Any], keys: Mapping[str, str]) -> dict[str, Any]:
    return {name: list(preset[key]) for key, name in keys.items() if preset.get(key) is not None}


def _reading_ends(rules: Rules, names: list[str]) -> Rules:
    """``rules`` with ``names`` also read as the end of a path: "to_k" then fits "blocks.0.attn.to_k"."""
    ends = {name: rf"(?:.*\.)?{re.escape(name)}$" for name in names}
    overrides = {ends[name]: rules.name_algo_map[name] for name in names if name in rules.name_algo_map}
    return replace(
        rules,
        target_name=(*rules.target_name, *ends.values()),
        name_algo_map={**rules.name_algo_map, **overrides},
    )


@dataclass(frozen=True)
class Part:
    """One model of a network: the prefix of its layers' names, the model, its rules."""

    prefix: str
    model: nn.Module
    rules: Rules
    is_unet: bool

    def classes(self, llm_adapter: bool) -> tuple[str, ...]:
        """Target classes; the language adapter of a transformer only on request."""
        return tuple(name for name in self.rules.target_module if llm_adapter or name != LLM_ADAPTER)

    def targets(self, llm_adapter: bool) -> Matches:
        """Layers to wrap.

        A preset of names alone, such as "ia3", writes the last part of each path ("to_k"): names that fit no whole
        path are read that way there.
        """
        found = self._targets(self.rules, llm_adapter)
        if not self.rules.target_module and not self.rules.use_fnmatch:
            lost = [name for name in self.rules.target_name if name not in found.patterns]
            found = self._targets(_reading_ends(self.rules, lost), llm_adapter) if lost else found
        return found

    def _targets(self, rules: Rules, llm_adapter: bool) -> Matches:
        """Per-name overrides change layers that are targets anyway; they add none."""
        classes = self.classes(llm_adapter)
        found = find_targets(self.model, rules, classes)
        if rules.name_algo_map:
            wanted = find_targets(self.model, replace(rules, name_algo_map={}), classes)
            found.targets = {name: target for name, target in found.targets.items() if name in wanted.targets}
        return found


def parts_of(text_encoder: Any, unet: nn.Module | None, rules: KohyaRules) -> list[Part]:
    """Text encoders first. A list of them is numbered from 1, a None in it keeps its number free."""
    text = rules.text_encoder
    if isinstance(text_encoder, list | tuple):
        named = [(f"{text.prefix}{index + 1}", model) for index, model in enumerate(text_encoder)]
    else:
        named = [(text.prefix, text_encoder)]
    parts = [Part(name, model, replace(text, prefix=name), False) for name, model in named if model is not None]
    if unet is not None:
        parts.append(Part(rules.unet.prefix, unet, rules.unet, True))
    return parts


def holder_of(parts: list[Part]) -> nn.Module:
    """One module over all models, for whatever walks a whole network's base."""
    holder = nn.Module()
    for part in parts:
        holder.add_module(part.prefix.replace(".", "_"), part.model)
    return holder
