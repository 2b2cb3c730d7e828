"""Errors a user can act on.

Every message names the layer, option or key, what was found, what is legal and the nearest right name. The command
line prints a :class:`DeltaFuseError` as one message and exits with code 2; anything else is a bug and keeps its trace.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class DeltaFuseError(Exception):
    """Base of all errors raised on purpose."""


class OptionError(DeltaFuseError, ValueError):
    """An option is unknown, misspelled, out of range or contradicts another one."""


class TargetError(DeltaFuseError, ValueError):
    """No module matched, or a module cannot carry the algorithm asked for."""


class ShapeError(DeltaFuseError, ValueError):
    """A dimension or a tensor shape has no legal reading."""


class CheckpointError(DeltaFuseError, ValueError):
    """A file is broken, hostile, of another kind, or does not fit the model."""


class BackendError(DeltaFuseError, RuntimeError):
    """A backend that was asked for by name cannot run the call."""


class MergeError(DeltaFuseError, RuntimeError):
    """A merge would double a delta, write a non-finite value or touch a base that cannot be merged."""


class DependencyError(DeltaFuseError, ImportError):
    """An optional package is missing."""


class DataError(DeltaFuseError, ValueError):
    """Training data is missing, unreadable or empty."""


def nearest(name: str, legal: Iterable[str]) -> str | None:
    """The legal name closest to ``name``, or None where nothing is close."""
    names = [str(item) for item in legal]
    folded = {item.lower().replace("-", "_"): item for item in reversed(names)}
    matches = difflib.get_close_matches(str(name).lower().replace("-", "_"), folded, n=1, cutoff=0.55)
    return folded[matches[0]] if matches else None


def unknown_name(kind: str, name: object, legal: Iterable[str], where: str = "") -> str:
    """One sentence for an unknown name: what and whose it is, the nearest legal name, all legal names."""
    names = sorted(str(item) for item in legal)
    close = nearest(str(name), names)
    hint = f" Did you mean '{close}'?" if close else ""
    place = f" {where}" if where else ""
    return f"unknown {kind} '{name}'{place}.{hint} Legal: {', '.join(names)}."
