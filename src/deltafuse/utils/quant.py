"""Which foreign quantized layer classes are loaded in this process.

Kept for scripts that test ``isinstance(layer, QuantLinears)``. Adapters do not use it: they recognise a quantized base
by what it can do. Nothing is imported here; a layer of a package can only exist once that package is loaded.
"""

from __future__ import annotations

import sys
from typing import Any

from ..logging import warning_once

_CLASSES = {
    "bitsandbytes.nn": ("Linear8bitLt", "LinearFP4", "LinearNF4"),
    "quanto.nn": ("QLinear", "QConv2d", "QLayerNorm"),
    "optimum.quanto.nn": ("QLinear", "QConv2d", "QLayerNorm"),
}


def quantized_classes() -> tuple[type, ...]:
    """The layer classes of the quantization packages that are loaded; empty where none is."""
    found: list[type] = []
    for module_name, names in _CLASSES.items():
        module = sys.modules.get(module_name)
        found.extend(cls for name in names if isinstance(cls := getattr(module, name, None), type))
    return tuple(found)


def __getattr__(name: str) -> Any:
    if name == "QuantLinears":
        return quantized_classes()
    if name == "SUPPORT_QUANT":
        return bool(quantized_classes())
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def log_bypass() -> None:
    """Say once that quantized layers are adapted without forming their weight."""
    warning_once("a quantized layer is adapted in bypass mode: its weight is never formed in full precision")


def log_fp8_bypass() -> None:
    """Say once that weight-only fp8 layers are adapted without forming their weight."""
    warning_once("a weight-only fp8 layer is adapted in bypass mode: its weight is never formed in full precision")


def log_suspect() -> None:
    """Say once that a linear layer of an unknown class is adapted in bypass mode."""
    warning_once("a linear layer of an unknown class is adapted in bypass mode; bypass_mode=False forbids that")
