"""Making one import name answer with this package's modules, and running scripts under that name."""

from __future__ import annotations

import importlib
import importlib.util
import os
import runpy
import sys
import threading
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType

from ..core.errors import DeltaFuseError

ALIAS = "lycoris"
TARGET = __name__.partition(".")[0]
_USAGE = "usage: python -m deltafuse.integrations.lycoris (SCRIPT | -m MODULE) [ARGS...]"
_lock = threading.RLock()
_current: LycorisAlias | None = None


class AliasError(DeltaFuseError, ImportError):
    """The name ``lycoris`` is already taken by another package in this process."""


def _target_name(fullname: str) -> str:
    return TARGET + fullname[len(ALIAS) :]


def _is_alias_name(fullname: str) -> bool:
    return fullname == ALIAS or fullname.startswith(ALIAS + ".")


class _AliasLoader(Loader):
    """Hands out the target module itself and leaves its own ``__spec__`` as it was."""

    def __init__(self, target: str) -> None:
        self.target = target
        self._own_spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self.target)
        self._own_spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The import system has just written the alias's spec into the module: undo that, the module ran long ago.
        module.__spec__ = self._own_spec

    def get_code(self, fullname: str) -> CodeType | None:
        """The target's code, for ``python -m`` style runs."""
        spec = importlib.util.find_spec(self.target)
        get_code = getattr(spec.loader, "get_code", None) if spec is not None else None
        return get_code(self.target) if get_code is not None else None


class _AliasFinder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not _is_alias_name(fullname):
            return None
        found = importlib.util.find_spec(_target_name(fullname))
        if found is None:
            return None
        is_package = found.submodule_search_locations is not None
        return ModuleSpec(fullname, _AliasLoader(_target_name(fullname)), origin=found.origin, is_package=is_package)


class LycorisAlias:
    """The alias in place; ``uninstall()`` (or leaving a ``with`` block) takes it away and restores what was there."""

    def __init__(self, replaced: dict[str, ModuleType]) -> None:
        self._finder = _AliasFinder()
        self._replaced = replaced
        package = importlib.import_module(TARGET)
        for name in replaced:
            del sys.modules[name]
        sys.meta_path.insert(0, self._finder)
        sys.modules[ALIAS] = package

    @property
    def active(self) -> bool:
        """True while ``import lycoris`` gives this package."""
        return self is _current

    def uninstall(self) -> None:
        """Free the name again; modules that ``force=True`` replaced come back. A second call does nothing."""
        global _current
        with _lock:
            if not self.active:
                return
            if self._finder in sys.meta_path:
                sys.meta_path.remove(self._finder)
            for name in [name for name in sys.modules if _is_alias_name(name)]:
                del sys.modules[name]
            sys.modules.update(self._replaced)
            _current = None

    def __enter__(self) -> LycorisAlias:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.uninstall()


def install_as_lycoris(force: bool = False) -> LycorisAlias:
    """Let the name ``lycoris`` answer with this package, from the next import of it on.

    Calling it again changes nothing and returns the same handle.

    Args:
        force: replace a ``lycoris`` that is already imported. Objects taken from it earlier stay what they are.

    Raises:
        AliasError: another ``lycoris`` is imported already and ``force`` is not set.
    """
    global _current
    with _lock:
        if _current is not None:
            return _current
        replaced = {name: module for name, module in sys.modules.items() if _is_alias_name(name)}
        if replaced and not force:
            where = getattr(replaced.get(ALIAS), "__file__", None) or "an unknown place"
            raise AliasError(
                f"another 'lycoris' is already imported (from {where}). Call install_as_lycoris() before anything "
                "imports it, or pass force=True to replace it."
            )
        _current = LycorisAlias(replaced)
        return _current


def uninstall_lycoris_alias() -> None:
    """Take the alias away if it is in place."""
    if _current is not None:
        _current.uninstall()


def main(argv: Sequence[str] | None = None) -> int:
    """Run a script or module as ``__main__`` with the alias in place; its exit code and errors are passed on."""
    args = list(sys.argv[1:] if argv is None else argv)
    as_module = args[:1] == ["-m"]
    if as_module:
        del args[0]
    if not args or (args[0].startswith("-") and not as_module):
        wants_help = args[:1] in (["-h"], ["--help"])
        print(_USAGE, file=sys.stdout if wants_help else sys.stderr)
        return 0 if wants_help else 2
    if not as_module and not os.path.exists(args[0]):
        print(f"no such script: '{args[0]}'\n{_USAGE}", file=sys.stderr)
        return 2
    install_as_lycoris()
    sys.argv = args
    if as_module:
        runpy.run_module(args[0], run_name="__main__", alter_sys=True)
    else:
        _use_script_folder(args[0])
        runpy.run_path(args[0], run_name="__main__")
    return 0


def _use_script_folder(script: str) -> None:
    """``sys.path[0]`` as ``python script.py`` sets it: the script's folder in place of the current one."""
    if getattr(sys.flags, "safe_path", False) or os.path.isdir(script):
        return
    sys.path[0] = os.path.dirname(os.path.realpath(script))
