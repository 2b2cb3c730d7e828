"""Walking a model by the rules: which layers are wrapped, under which name, with which overrides."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ..core.errors import TargetError, nearest
from .rules import Rules


@dataclass(frozen=True)
class Target:
    """One layer to wrap: its unique name, its path in the model, and its overrides."""

    lora_name: str
    path: str
    module: nn.Module
    config: Mapping[str, Any]


@dataclass
class Matches:
    """Targets in walking order, and which classes and patterns found something."""

    targets: dict[str, Target] = field(default_factory=dict)
    classes: set[str] = field(default_factory=set)
    patterns: set[str] = field(default_factory=set)

    def add(self, target: Target) -> None:
        self.targets.setdefault(target.lora_name, target)


def find_targets(root: nn.Module, rules: Rules, classes: tuple[str, ...]) -> Matches:
    """Every candidate layer: blocks of a target class with all their children, then single layers by name."""
    found = Matches()
    names = (*rules.target_name, *rules.name_algo_map)
    for path, module in root.named_modules():
        if rules.excluded(path):
            continue
        kind = type(module).__name__
        by_name = rules.any_match(names, path)
        if kind in classes and not by_name:
            found.classes.add(kind)
            _descend(found, rules, path, module, rules.module_algo_map.get(kind, {}))
        elif by_name:
            found.classes.add(kind)
            found.patterns.update(name for name in names if name == path or rules.matches(name, path))
            config = rules.name_config(path) or rules.module_algo_map.get(kind, {})
            found.add(Target(lora_name(rules.prefix, path), path, module, config))
    return found


def _descend(found: Matches, rules: Rules, path: str, block: nn.Module, config: Mapping[str, Any]) -> None:
    for relative, child in block.named_modules():
        full = ".".join(part for part in (path, relative) if part)
        if rules.excluded(full):
            continue
        kind = type(child).__name__
        named = rules.name_config(full)
        if named is None and kind in rules.module_algo_map and child is not block:
            _descend(found, rules, full, child, rules.module_algo_map[kind])
            continue
        found.add(Target(lora_name(rules.prefix, full), full, child, config if named is None else named))


def lora_name(prefix: str, path: str) -> str:
    """The unique name of the layer at ``path``: prefix and path joined by underscores."""
    return f"{prefix}_{path}".replace(".", "_")


def no_match(root: nn.Module, rules: Rules, classes: tuple[str, ...]) -> TargetError:
    """The error for a network without a single layer, with the nearest names the model has."""
    paths = [path for path, _ in root.named_modules() if path]
    kinds = sorted({type(module).__name__ for module in root.modules()})
    hints = [*_hints(rules.target_name, paths, "name"), *_hints(classes, kinds, "class")]
    asked = f"classes {', '.join(classes) or 'none'}"
    if rules.target_name:
        asked += f"; names {', '.join(rules.target_name)}"
    hint = f" Nearest in the model: {'; '.join(hints)}." if hints else ""
    return TargetError(
        f"no layer of {type(root).__name__} matches the targets ({asked}).{hint} "
        f"The model has classes: {', '.join(kinds[:20])}{', ...' if len(kinds) > 20 else ''}."
    )


def _hints(asked: tuple[str, ...], present: list[str], kind: str) -> Iterator[str]:
    for item in asked:
        tail = item.strip("^$.*?").rpartition(".")[2] or item
        tails = {path.rpartition(".")[2]: path for path in reversed(present)}
        close = nearest(item, present) or tails.get(nearest(tail, tails) or "")
        if close and close != item:
            yield f"{kind} '{item}' -> '{close}'"
