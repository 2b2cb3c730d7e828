"""The LyCORIS name of :mod:`deltafuse.algorithms.tlora`."""

from ..algorithms.tlora import (
    SigType,
    TLoraModule,
    clear_timestep_mask,
    compute_timestep_mask,
    get_timestep_mask,
    set_timestep_mask,
)

__all__ = [
    "SigType",
    "TLoraModule",
    "clear_timestep_mask",
    "compute_timestep_mask",
    "get_timestep_mask",
    "set_timestep_mask",
]
