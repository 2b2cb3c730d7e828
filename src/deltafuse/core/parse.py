"""Reading option values that may come as strings from a command line or a config file."""

from __future__ import annotations

from typing import Any

from .errors import OptionError

_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"", "0", "false", "no", "off", "none"}


def as_bool(name: str, value: Any) -> bool:
    """A plain yes or no; None is no."""
    if value is None or isinstance(value, (bool, int)):
        return bool(value)
    folded = str(value).strip().lower()
    if folded in _TRUE or folded in _FALSE:
        return folded in _TRUE
    raise OptionError(f"option {name}={value!r} is neither yes nor no. Legal: true, false, yes, no, on, off, 1, 0.")


def as_int(name: str, value: Any) -> int:
    """A whole number."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise OptionError(f"option {name}={value!r} is not a whole number") from None
    if number != int(number):
        raise OptionError(f"option {name}={value!r} is not a whole number")
    return int(number)


def as_number(name: str, value: Any) -> float:
    """Any number."""
    try:
        return float(value)
    except (TypeError, ValueError):
        raise OptionError(f"option {name}={value!r} is not a number") from None
