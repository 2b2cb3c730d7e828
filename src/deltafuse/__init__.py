"""deltafuse: LoRA-family adapters that are exact in every form and planned per layer.

The LyCORIS names are here under the package's own name; ``install_as_lycoris`` makes the name ``lycoris`` answer too.
"""

from __future__ import annotations

from . import functional, kohya, modules, utils
from ._version import __version__
from .backends import available_backends, register_backend, unregister_backend
from .config import list_builtin_presets
from .config_sdk import AlgoOverride, PresetConfig, PresetValidationError, describe_algo, list_algorithms
from .core.errors import DeltaFuseError
from .core.policy import use_backend
from .integrations.alias import install_as_lycoris
from .logging import logger
from .modules import (
    ButterflyOFTModule,
    DiagOFTModule,
    DyLoraModule,
    FullModule,
    GLoRAModule,
    IA3Module,
    InputOFTModule,
    LoConModule,
    LohaModule,
    LokrModule,
    NormModule,
    TLoraModule,
    make_module,
)
from .modules.tlora import clear_timestep_mask, compute_timestep_mask, get_timestep_mask, set_timestep_mask
from .network import explain
from .wrapper import LycorisNetwork, create_lycoris, create_lycoris_from_weights

__all__ = [
    "AlgoOverride",
    "ButterflyOFTModule",
    "DeltaFuseError",
    "DiagOFTModule",
    "DyLoraModule",
    "FullModule",
    "GLoRAModule",
    "IA3Module",
    "InputOFTModule",
    "LoConModule",
    "LohaModule",
    "LokrModule",
    "LycorisNetwork",
    "NormModule",
    "PresetConfig",
    "PresetValidationError",
    "TLoraModule",
    "__version__",
    "available_backends",
    "clear_timestep_mask",
    "compute_timestep_mask",
    "create_lycoris",
    "create_lycoris_from_weights",
    "describe_algo",
    "explain",
    "functional",
    "get_timestep_mask",
    "install_as_lycoris",
    "kohya",
    "list_algorithms",
    "list_builtin_presets",
    "logger",
    "make_module",
    "modules",
    "register_backend",
    "set_timestep_mask",
    "unregister_backend",
    "use_backend",
    "utils",
]
