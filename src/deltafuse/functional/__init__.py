"""Stateless forms of the algorithms: tensors in, a delta or its product with an input out.

One module per algorithm, each with ``weight_gen`` (fresh tensors for a weight), ``diff_weight`` (the dense delta) and
``bypass_forward_diff`` (the delta's part of a layer's output, without the base's). ``backend`` is None or "auto" for
the choice in force, or a backend's name, which then runs or raises :class:`~deltafuse.core.errors.BackendError`.
"""

from __future__ import annotations

from . import boft, diag_oft, general, locon, loha, lokr
from .general import (
    FUNC_LIST,
    add_scaled,
    apply_dora_scale,
    factorization,
    power2factorization,
    rebuild_tucker,
    tucker_weight,
    tucker_weight_from_conv,
    weight_decompose,
)

__all__ = [
    "FUNC_LIST",
    "add_scaled",
    "apply_dora_scale",
    "boft",
    "diag_oft",
    "factorization",
    "general",
    "locon",
    "loha",
    "lokr",
    "power2factorization",
    "rebuild_tucker",
    "tucker_weight",
    "tucker_weight_from_conv",
    "weight_decompose",
]
