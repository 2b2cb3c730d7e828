"""The LyCORIS name of :mod:`deltafuse.algorithms.glora`."""

from ..algorithms.glora import GLoRAModule

__all__ = ["GLoRAModule"]
