"""The LyCORIS name of :mod:`deltafuse.algorithms.loha`."""

from ..algorithms.loha import LohaModule

__all__ = ["LohaModule"]
