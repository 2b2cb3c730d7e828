"""The list of primitives and the table of functions a form runs through.

A primitive is one operation that a backend may implement: a name, its PyTorch reference (differentiable, float64
capable) and one line about it. Deltas call primitives only through a :class:`Kernels` table handed to them, so a
form never knows which backend runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from ..core.errors import OptionError, unknown_name


@dataclass(frozen=True)
class Primitive:
    """name, PyTorch reference and a one-line summary."""

    name: str
    reference: Callable[..., Any]
    summary: str


_primitives: dict[str, Primitive] = {}


def primitive(summary: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated reference under its own name."""

    def register(reference: Callable[..., Any]) -> Callable[..., Any]:
        name = reference.__name__
        _primitives[name] = Primitive(name, reference, summary)
        return reference

    return register


def primitives() -> Mapping[str, Primitive]:
    """Every primitive by name."""
    return dict(_primitives)


def get_primitive(name: str) -> Primitive:
    """One primitive, or an OptionError with the nearest name."""
    if name not in _primitives:
        raise OptionError(unknown_name("primitive", name, _primitives))
    return _primitives[name]


class Kernels(SimpleNamespace):
    """One callable per primitive, reached as an attribute: ``kernels.lowrank_down(x, a)``."""

    def fused(self, name: str) -> bool:
        """Whether a backend's own implementation of ``name`` runs, not the reference."""
        return getattr(self, name) is not _primitives[name].reference


def kernel_table(overrides: Mapping[str, Callable[..., Any]] | None = None) -> Kernels:
    """References for every primitive, replaced by ``overrides`` where given."""
    table: dict[str, Callable[..., Any]] = {name: item.reference for name, item in _primitives.items()}
    if overrides:
        _check(overrides)
        table.update(overrides)
    return Kernels(**table)


def _check(names: Iterable[str]) -> None:
    for name in names:
        get_primitive(name)
