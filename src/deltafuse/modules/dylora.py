"""The LyCORIS name of :mod:`deltafuse.algorithms.dylora`."""

from ..algorithms.dylora import DyLoraModule

__all__ = ["DyLoraModule"]
