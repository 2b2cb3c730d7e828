"""The LyCORIS names of the module classes, and reading one layer's module from a file's tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..algorithms.registry import detection_order
from ..core.factorize import factorization
from . import base, boft, dylora, full, glora, ia3, locon, loha, lokr, norms, oft, tlora  # noqa: F401
from .base import LycorisBaseModule
from .boft import ButterflyOFTModule
from .diag_oft import DiagOFTModule
from .dylora import DyLoraModule
from .full import FullModule
from .glora import GLoRAModule
from .ia3 import IA3Module
from .locon import LoConModule
from .loha import LohaModule
from .lokr import LokrModule
from .norms import NormModule
from .oft import InputOFTModule
from .tlora import TLoraModule

MODULE_LIST = [
    LoConModule,
    LohaModule,
    IA3Module,
    LokrModule,
    FullModule,
    NormModule,
    DiagOFTModule,
    InputOFTModule,
    ButterflyOFTModule,
    GLoRAModule,
    DyLoraModule,
    TLoraModule,
]


def get_module(lyco_state_dict: dict[str, Tensor], lora_name: str) -> tuple[Any, Any]:
    """(module class, its tensors in ``weight_list`` order) for one layer of a file, or (None, None)."""
    for info in detection_order():
        cls = info.module_class
        if cls.algo_check(lyco_state_dict, lora_name):
            return cls, tuple(cls.extract_state_dict(lyco_state_dict, lora_name))
    return None, None


@torch.no_grad()
def make_module(lyco_type: Any, params: Any, lora_name: str, orig_module: nn.Module) -> Any:
    """The module :func:`get_module` found, built on ``orig_module``."""
    return lyco_type.make_module_from_state_dict(lora_name, orig_module, *params)


__all__ = [
    "MODULE_LIST",
    "ButterflyOFTModule",
    "DiagOFTModule",
    "DyLoraModule",
    "FullModule",
    "GLoRAModule",
    "IA3Module",
    "InputOFTModule",
    "LoConModule",
    "LohaModule",
    "LokrModule",
    "LycorisBaseModule",
    "NormModule",
    "TLoraModule",
    "factorization",
    "get_module",
    "make_module",
]
