"""Optional dependencies: imported where they are used, their absence is a sentence that says what to install."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

from .errors import DependencyError
from .verdict import Verdict


def require(module: str, *, extra: str, purpose: str = "") -> ModuleType:
    """Import ``module`` or raise :class:`DependencyError` naming the extra of this package that brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        root = module.partition(".")[0]
        for_what = f" for {purpose}" if purpose else ""
        if importlib.util.find_spec(root) is None:
            raise DependencyError(
                f"the package '{root}' is needed{for_what} and is not installed: pip install 'deltafuse[{extra}]'"
            ) from error
        raise DependencyError(f"the package '{root}' is needed{for_what} but fails to import: {error}") from error


def available(module: str, *, extra: str) -> Verdict:
    """Whether ``module`` can be found, without importing it."""
    if importlib.util.find_spec(module) is None:
        return Verdict(False, f"not installed: pip install 'deltafuse[{extra}]'")
    return Verdict(True, "installed")
