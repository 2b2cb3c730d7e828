"""Which layers an adapter goes on: names and patterns resolved against a model before anything is changed."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence

from torch import nn

from ..core.errors import OptionError, TargetError, nearest

LINEAR = (nn.Linear,)
LINEAR_AND_CONV = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NORMS = (nn.LayerNorm, nn.GroupNorm)


def adaptable(model: nn.Module, kinds: tuple[type[nn.Module], ...], norms: bool = False) -> list[str]:
    """Dotted names of the layers of ``kinds``, in model order; with ``norms`` also LayerNorm, GroupNorm and RMSNorm."""

    def fits(module: nn.Module) -> bool:
        is_norm = isinstance(module, _NORMS) or type(module).__name__.endswith("RMSNorm")
        return isinstance(module, kinds) or (norms and is_norm)

    return [name for name, module in model.named_modules() if name and fits(module)]


def in_blocks(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Those of ``names`` that lie in a repeated block, that is, below some ``nn.ModuleList``: no head, no stem."""
    lists = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and name)
    return [name for name in names if name.startswith(lists)]


def matches(pattern: str, name: str) -> bool:
    """Whether ``pattern`` means the layer ``name``.

    A glob may mean the whole dotted name, the end of it, or a module around it: ``q_proj``, ``layers.3`` and
    ``*.mlp.*`` all work. ``re:`` starts a regular expression for the whole name.
    """
    if pattern.startswith("re:"):
        return re.fullmatch(pattern[3:], name) is not None
    forms = (pattern, f"*.{pattern}", f"{pattern}.*", f"*.{pattern}.*")
    return any(fnmatch.fnmatchcase(name, form) for form in forms)


def resolve(patterns: Sequence[str], names: Sequence[str], option: str) -> list[str]:
    """The ``names`` that some pattern means; TargetError for a pattern that means none, OptionError for a bad regex."""
    chosen: set[str] = set()
    for pattern in patterns:
        try:
            found = [name for name in names if matches(pattern, name)]
        except re.error as error:
            raise OptionError(f"option '{option}' has a broken regular expression '{pattern}': {error}") from error
        if not found:
            raise TargetError(_no_match(pattern, names, option))
        chosen.update(found)
    return [name for name in names if name in chosen]


def _no_match(pattern: str, names: Sequence[str], option: str) -> str:
    """Zero matches, with the nearest last part or whole name and the kinds of layers there are."""
    parts = list(dict.fromkeys(name.rsplit(".", 1)[-1] for name in names))
    close = nearest(pattern.rsplit(".", 1)[-1].strip("*"), parts) or nearest(pattern, names)
    hint = f" Did you mean '{close}'?" if close else ""
    shown = ", ".join(parts[:12]) + (", ..." if len(parts) > 12 else "")
    return f"option '{option}': '{pattern}' matches no layer.{hint} Layers end in: {shown or 'nothing adaptable'}."
