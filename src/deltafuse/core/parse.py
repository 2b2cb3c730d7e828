"""Reading option values that may come as strings from a command line or a config file."""

from __future__ import annotations

from typing import Any

from .errors import OptionError

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


def as_bool(name: str, value: Any) -> bool:
    """A switch: bool, 0 or 1, or one of 1/0, true/false, yes/no, on/off in any case; None is False.

    Anything else raises OptionError, so that a misspelled "flase" does not turn an option on.
    """
    if value is None:
        return False
    if isinstance(value, str):
        word = value.strip().lower()
        if word in _TRUE or word in _FALSE:
            return word in _TRUE
    elif isinstance(value, bool) or (_is_number(value) and value in (0, 1)):
        return bool(value)
    place = f"option {name}: " if name else ""
    raise OptionError(f"{place}cannot read {value!r} as a switch. Legal: true, false, yes, no, on, off, 1, 0.")


def _is_number(value: Any) -> bool:
    return hasattr(value, "__int__") and hasattr(value, "__float__") and getattr(value, "ndim", 0) == 0


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
