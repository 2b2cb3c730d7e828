"""The LyCORIS name of :mod:`deltafuse.algorithms.full`."""

from ..algorithms.full import FullModule

__all__ = ["FullModule"]
