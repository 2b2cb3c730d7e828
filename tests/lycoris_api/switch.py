"""Let the name ``lycoris`` mean one package inside a block and leave the rest of the process untouched.

The suite needs ``lycoris`` to be the alias while other tests of the same process import the published package, so
the module table and the import hooks are swapped for the length of a ``with`` block only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType

NAME = "lycoris"


def _answers(key: str) -> bool:
    return key == NAME or key.startswith(NAME + ".")


def _take_modules() -> dict[str, ModuleType]:
    return {key: sys.modules.pop(key) for key in list(sys.modules) if _answers(key)}


class NameSwitch:
    """One meaning of the name ``lycoris``: entered many times, installed by ``install`` on the first entry."""

    def __init__(self, install: Callable[[], object]) -> None:
        self._install = install
        self._modules: dict[str, ModuleType] = {}
        self._finders: list | None = None
        self._depth = 0

    @contextmanager
    def __call__(self) -> Iterator[None]:
        if self._depth:
            yield
            return
        outer_modules, outer_finders = _take_modules(), list(sys.meta_path)
        self._depth += 1
        try:
            self._enter(outer_finders)
            yield
        finally:
            self._depth -= 1
            self._finders = list(sys.meta_path)
            self._modules = _take_modules()
            sys.modules.update(outer_modules)
            sys.meta_path[:] = outer_finders

    def _enter(self, outer_finders: list) -> None:
        if self._finders is None:
            sys.meta_path[:] = [finder for finder in outer_finders if not _is_alias_finder(finder)]
            self._install()
            return
        sys.modules.update(self._modules)
        sys.meta_path[:] = self._finders


def _is_alias_finder(finder: object) -> bool:
    kind = finder if isinstance(finder, type) else type(finder)
    return kind.__module__.split(".")[0] == "deltafuse"
