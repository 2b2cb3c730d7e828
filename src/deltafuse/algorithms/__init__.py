"""One file per algorithm: parameters, initialisation, checkpoint keys, and the delta they denote.

Every module in this folder is imported here; each registers itself. A new algorithm is a new file.
"""

from __future__ import annotations

import importlib
import pkgutil

from .registry import (
    AlgorithmInfo,
    algorithm_names,
    algorithms,
    detection_order,
    get_algorithm,
    register_algorithm,
    unregister_algorithm,
)

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f".{_module.name}", __name__)

__all__ = [
    "AlgorithmInfo",
    "algorithm_names",
    "algorithms",
    "detection_order",
    "get_algorithm",
    "register_algorithm",
    "unregister_algorithm",
]
