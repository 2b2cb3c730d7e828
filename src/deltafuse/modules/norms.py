"""The LyCORIS name of :mod:`deltafuse.algorithms.norm`."""

from ..algorithms.norm import NormModule

__all__ = ["NormModule"]
