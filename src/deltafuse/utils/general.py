"""Small helpers without dependencies."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from ..core.errors import OptionError

T = TypeVar("T")

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


def str_bool(val: Any) -> bool:
    """Read a switch: bool, 0 or 1, or one of 1/0, true/false, yes/no, on/off in any case; None is False.

    Anything else raises :class:`OptionError`, so that a misspelled "flase" does not turn an option on.
    """
    if val is None:
        return False
    if isinstance(val, str):
        word = val.strip().lower()
        if word in _TRUE:
            return True
        if word in _FALSE:
            return False
    elif isinstance(val, bool) or (_is_number(val) and val in (0, 1)):
        return bool(val)
    raise OptionError(f"cannot read {val!r} as a switch. Legal: true, false, yes, no, on, off, 1, 0.")


def _is_number(val: Any) -> bool:
    return hasattr(val, "__int__") and hasattr(val, "__float__") and getattr(val, "ndim", 0) == 0


def default(val: T | None, d: T) -> T:
    """``val``, or ``d`` where ``val`` is None; a zero or an empty string is kept."""
    return d if val is None else val


def product(xs: Iterable[int | float]) -> int | float:
    """The product of ``xs``; 1 for none."""
    result: int | float = 1
    for x in xs:
        result *= x
    return result
