"""Choices made by the user: backend, strict mode. Read once per change, never per call from the environment."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import OptionError, unknown_name

AUTO = "auto"
BACKEND_VARIABLES = ("DELTAFUSE_BACKEND", "LYCORIS_KERNEL_BACKEND")
TUNE_VARIABLE = "DELTAFUSE_TUNE"
CACHE_VARIABLE = "DELTAFUSE_CACHE_DIR"
VARIABLES = (*BACKEND_VARIABLES, "DELTAFUSE_STRICT", TUNE_VARIABLE, CACHE_VARIABLE)
"""Every environment variable this version reads."""
TUNE_MODES = ("table", "lazy", "off")
_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"", "0", "false", "no", "off"}


@dataclass
class _State:
    override: str | None = None
    environment: tuple[Any, ...] | None = None
    from_environment: str = AUTO


_state = _State()
_known: dict[str, None] = {AUTO: None}


def know_backend(name: str) -> None:
    """Make ``name`` a legal value of every backend option."""
    _known[name] = None


def forget_backend(name: str) -> None:
    """Undo :func:`know_backend`."""
    _known.pop(name, None)


def check_backend(name: str, where: str = "") -> str:
    """``name`` folded to lower case, or an OptionError with the nearest legal one."""
    folded = str(name).strip().lower()
    if folded not in _known:
        raise OptionError(unknown_name("backend", name, _known, where))
    return folded


def requested_backend(explicit: str | None = None) -> str:
    """The backend in force: the call's own, then ``use_backend``, then the environment, then ``auto``."""
    if explicit is not None:
        return check_backend(explicit)
    if _state.override is not None:
        return _state.override
    return _from_environment()


def _raw_reader() -> Callable[[], tuple[Any, ...]]:
    """Reads the backend variables undecoded, a few times faster than ``os.environ.get``: every layer call asks."""
    data, encode = getattr(os.environ, "_data", None), getattr(os.environ, "encodekey", None)
    if not isinstance(data, dict) or encode is None:
        return lambda: tuple(os.environ.get(name) for name in BACKEND_VARIABLES)
    first, second = (encode(name) for name in BACKEND_VARIABLES)
    return lambda: (data.get(first), data.get(second))


_read_raw = _raw_reader()


def _from_environment() -> str:
    raw = _read_raw()
    if raw != _state.environment:
        chosen = next(((name, os.environ[name]) for name in BACKEND_VARIABLES if os.environ.get(name)), None)
        _state.from_environment = AUTO if chosen is None else check_backend(chosen[1], f"in {chosen[0]}")
        _state.environment = raw
    return _state.from_environment


@contextmanager
def use_backend(name: str | None) -> Iterator[None]:
    """Run the block with one backend; ``None`` or ``"auto"`` gives the choice back. Nests; process-wide."""
    previous = _state.override
    _state.override = None if name is None else check_backend(name)
    try:
        yield
    finally:
        _state.override = previous


def flag(name: str, default: bool = False) -> bool:
    """A boolean environment variable; anything but a plain yes or no is an OptionError."""
    value = os.environ.get(name)
    if value is None:
        return default
    folded = value.strip().lower()
    if folded in _TRUE:
        return True
    if folded in _FALSE:
        return False
    raise OptionError(f"{name}={value!r} is neither yes nor no. Legal: 1, 0, true, false, yes, no, on, off.")


def strict() -> bool:
    """Whether a fallback is an error (``DELTAFUSE_STRICT``)."""
    return flag("DELTAFUSE_STRICT")


def tune_mode() -> str:
    """Where kernel configurations come from (``DELTAFUSE_TUNE``).

    table: tables and earlier results; nothing is ever timed. lazy: a missing one is timed at its first use. off:
    heuristics alone.
    """
    value = os.environ.get(TUNE_VARIABLE, "").strip().lower() or TUNE_MODES[0]
    if value not in TUNE_MODES:
        raise OptionError(unknown_name("mode", value, TUNE_MODES, f"in {TUNE_VARIABLE}"))
    return value


def cache_dir() -> Path:
    """Where results that outlive a process are kept (``DELTAFUSE_CACHE_DIR``, else ``~/.cache/deltafuse``)."""
    return Path(os.environ.get(CACHE_VARIABLE) or "~/.cache/deltafuse").expanduser()
