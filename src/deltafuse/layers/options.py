"""Option names across all algorithms, so that a misspelled one is an error and an idle one is said."""

from __future__ import annotations

import inspect
from typing import Any

from ..core.errors import OptionError, unknown_name
from ..core.messages import say_once

COMMON = frozenset({"dropout", "rank_dropout", "module_dropout", "rank_dropout_scale", "bypass_mode"})
_STRUCTURAL = {"self", "lora_name", "org_module", "kwargs", "extra", "args"}
_known: set[str] = set(COMMON)


def know_options(cls: type) -> None:
    """Add the named constructor parameters and declared options of an algorithm class."""
    parameters = inspect.signature(cls.__init__).parameters  # type: ignore[misc]
    _known.update(set(parameters) - _STRUCTURAL)
    _known.update(getattr(cls, "options", ()))


def known_options() -> frozenset[str]:
    """Every option name some algorithm takes."""
    return frozenset(_known)


def is_idle(value: Any) -> bool:
    """Whether a value asks for nothing: unset, off, zero, or an automatic choice."""
    return value is None or value is False or value in (0, 0.0, -1, "", "0", "-1", "False", "false")


def check_options(cls: Any, extra: dict[str, Any]) -> None:
    """Refuse unknown names in a constructor's leftovers; say once what has no effect on this algorithm."""
    for key, value in extra.items():
        if key not in _known:
            raise OptionError(unknown_name("option", key, _known, f"for {cls.name}"))
        if not is_idle(value) and key not in cls.options:
            say_once(f"option {key}={value!r} has no effect on {cls.name} and was left out")
