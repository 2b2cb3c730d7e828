"""Let the name ``lycoris`` mean one package inside a block and leave the rest of the process untouched.

One process may hold tests that need the published package and tests that need the alias, so the module table and the
import hooks are swapped for the length of a ``with`` block only.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType

NAME = "lycoris"


def _answers(key: str) -> bool:
    return key.startswith(NAME) and (key == NAME or key.startswith(NAME + "."))


def _take_modules() -> dict[str, ModuleType]:
    return {key: sys.modules.pop(key) for key in [key for key in sys.modules if _answers(key)]}


def _is_alias_finder(finder: object) -> bool:
    kind = finder if isinstance(finder, type) else type(finder)
    return kind.__module__.split(".")[0] == "deltafuse"


class NameSwitch(ABC):
    """A meaning of the name ``lycoris``, entered many times; an entry inside another of its own does nothing."""

    def __init__(self) -> None:
        self._active = False

    @contextmanager
    def __call__(self) -> Iterator[None]:
        if self._active:
            yield
            return
        outer_modules, outer_finders = _take_modules(), list(sys.meta_path)
        self._active = True
        try:
            with self._meaning():
                yield
        finally:
            self._active = False
            _take_modules()
            sys.modules.update(outer_modules)
            sys.meta_path[:] = outer_finders

    @abstractmethod
    def _meaning(self) -> AbstractContextManager[None]:
        """Make the name mean this package until the block ends."""


class PublishedLycoris(NameSwitch):
    """The installed lycoris-lora; its modules are imported once and shown again at every entry."""

    def __init__(self) -> None:
        super().__init__()
        self._modules: dict[str, ModuleType] = {}

    @contextmanager
    def _meaning(self) -> Iterator[None]:
        sys.meta_path[:] = [finder for finder in sys.meta_path if not _is_alias_finder(finder)]
        sys.modules.update(self._modules)
        import lycoris

        assert not hasattr(lycoris, "install_as_lycoris")
        try:
            yield
        finally:
            self._modules = {key: module for key, module in sys.modules.items() if _answers(key)}


class AliasedLycoris(NameSwitch):
    """deltafuse behind the name."""

    @contextmanager
    def _meaning(self) -> Iterator[None]:
        import deltafuse

        alias = deltafuse.install_as_lycoris()
        try:
            yield
        finally:
            alias.uninstall()
