"""The list of algorithms: what names exist, and which module class each builds.

Registering is all a new algorithm needs: the network, the file reader, the trainer, the doctor and the generic test
suites walk this list.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from ..core.errors import OptionError, unknown_name

Cls = TypeVar("Cls", bound=type)


@dataclass(frozen=True)
class AlgorithmInfo:
    """name, other names users type, the module class, a one-line summary, and the order files are recognised in."""

    name: str
    aliases: tuple[str, ...]
    module_class: Any
    summary: str
    detect_order: int = 100


_algorithms: dict[str, AlgorithmInfo] = {}


def register_algorithm(detect_order: int = 100):  # type: ignore[no-untyped-def]
    """Class decorator: add the class under its ``name`` and ``aliases``. Lower orders claim a file's keys first."""

    def add(cls: Cls) -> Cls:
        info: Any = cls
        _algorithms[info.name] = AlgorithmInfo(info.name, tuple(info.aliases), cls, info.summary, detect_order)
        return cls

    return add


def unregister_algorithm(name: str) -> None:
    """Remove an algorithm registered from outside."""
    _algorithms.pop(name, None)


def algorithms() -> Mapping[str, AlgorithmInfo]:
    """Every algorithm by its main name."""
    return dict(_algorithms)


def algorithm_names() -> dict[str, str]:
    """Every name a user may type -> the main name."""
    return {alias: info.name for info in _algorithms.values() for alias in (info.name, *info.aliases)}


def get_algorithm(name: str) -> AlgorithmInfo:
    """The algorithm behind a name or alias, any case; unknown names raise with the nearest one."""
    names = algorithm_names()
    folded = str(name).strip().lower().replace("_", "-")
    main = names.get(folded, names.get(str(name).strip().lower()))
    if main is None:
        raise OptionError(unknown_name("algorithm", name, names))
    return _algorithms[main]


def detection_order() -> list[AlgorithmInfo]:
    """Algorithms in the order in which they look at a file's keys."""
    return sorted(_algorithms.values(), key=lambda info: info.detect_order)
