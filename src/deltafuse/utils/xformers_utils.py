"""Whether xformers' attention can be used; the package is looked up on first use."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any


def _attention() -> Any:
    if importlib.util.find_spec("xformers") is None:
        return None
    try:
        return importlib.import_module("xformers.ops").memory_efficient_attention
    except (ImportError, OSError, RuntimeError):
        # A build for another torch or CUDA version: the same answer as no build at all.
        return None


def __getattr__(name: str) -> Any:
    if name == "memory_efficient_attention":
        return _attention()
    if name == "XFORMERS_AVAIL":
        return _attention() is not None
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
