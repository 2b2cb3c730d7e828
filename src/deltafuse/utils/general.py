"""Small helpers without dependencies."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from ..core.parse import as_bool

T = TypeVar("T")


def str_bool(val: Any) -> bool:
    """Read a switch, see :func:`deltafuse.core.parse.as_bool`."""
    return as_bool("", val)


def default(val: T | None, d: T) -> T:
    """``val``, or ``d`` where ``val`` is None; a zero or an empty string is kept."""
    return d if val is None else val


def product(xs: Iterable[int | float]) -> int | float:
    """The product of ``xs``; 1 for none."""
    result: int | float = 1
    for x in xs:
        result *= x
    return result
